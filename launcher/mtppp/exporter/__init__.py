"""Commands for people who must run a deployment without mtppp."""
