"""Policy maps: a pool of endpoint ids with a map each, made before pods need them."""
