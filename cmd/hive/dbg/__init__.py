"""``cilium-dbg``: the command line of Cilium's client, for tools and people who know it."""
