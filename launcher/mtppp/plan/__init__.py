"""From cluster.yaml, a model's configuration and the facts of the hosts to a Plan. All pure."""
