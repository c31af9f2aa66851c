"""The only room that touches the outside: transports to a host, and what is asked of it."""
