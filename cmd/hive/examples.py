"""Examples for the help of each command; a test parses each of them."""

from __future__ import annotations

import click

EXAMPLES = {
    "agent": (
        "hive agent --config-dir=/tmp/cilium/config-map",
        "hive agent --enable-ipv6=true --mtu=1400",
    ),
    "api": ("hive api", "hive api -o json", "hive api -o jsonpath='{.paths}'"),
    "bgp peers": ("hive bgp peers", "hive bgp peers -o json"),
    "bgp route-policies": ("hive bgp route-policies",),
    "bgp routes": ("hive bgp routes", "hive bgp routes sent --peer 192.0.2.1"),
    "bpf dump": ("hive bpf dump lxc", "hive bpf dump ct4_global", "hive bpf dump metrics -o json"),
    "bpf lb list": ("hive bpf lb list", "hive bpf lb list -o wide"),
    "bpf lb maglev get": ("hive bpf lb maglev get 1",),
    "bpf lb maglev list": ("hive bpf lb maglev list",),
    "bpf list": ("hive bpf list", "hive bpf list -o json"),
    "bpf policy": ("hive bpf policy default/web", "hive bpf policy 17 -o wide"),
    "build-config": (
        "hive build-config --dest out --source config-map:kube-system/cilium-config",
        "hive build-config --manifests-dir manifests --node-name node-1 --dest config",
    ),
    "check": (
        "hive check",
        "hive check --only pods-other-node --only mtu",
        "hive check --outside 192.0.2.10:443 --json",
    ),
    "cleanup": ("hive cleanup --all-state", "hive cleanup --bpf-state"),
    "cni install": ("hive cni install", "hive cni install --cni-dir /opt/cni/bin"),
    "cni uninstall": ("hive cni uninstall",),
    "cluster bundle": (
        "hive cluster bundle",
        "hive cluster bundle --node node-1 --node node-2 -f incident.tar.gz",
    ),
    "cluster status": (
        "hive cluster status",
        "hive cluster status --wait --timeout 300",
        "hive cluster status --context staging -n cilium -o json",
    ),
    "cluster ui": ("hive cluster ui", "hive cluster ui --no-browser --port 12000 --context staging"),
    "config diff": ("hive config diff",),
    "config get": ("hive config get mtu", "hive config get enable-policy"),
    "config list": (
        "hive config list --live --origin",
        "hive config list --set --config-dir=config",
        "hive config list --mtu=1400",
    ),
    "config reference": (
        "hive config reference > settings.md",
        "hive config reference --of operator --format schema",
    ),
    "config set": ("hive config set PolicyEnforcement=always", "hive config set Debug=Enabled"),
    "db list": ("hive db list",),
    "db show": ("hive db show nodes", "hive db show ipcache 10.0.1.7/32 -o yaml"),
    "db watch": ("hive db watch endpoints", "hive db watch policies"),
    "completion": ("source <(hive completion bash)", "hive completion fish"),
    "debug bundle": ("hive debug bundle", "hive debug bundle -f - > bundle.tar.gz"),
    "drop-reason": ("hive drop-reason 133", "hive drop-reason 'Policy denied'", "hive drop-reason"),
    "encryption rotate": ("hive encryption rotate", "hive encryption rotate --no-wait"),
    "encryption status": ("hive encryption status",),
    "endpoint config": (
        "hive endpoint config default/web",
        "hive endpoint config default/web PolicyAuditMode=Enabled",
    ),
    "endpoint get": ("hive endpoint get default/web", "hive endpoint get 10.0.1.7 -o yaml"),
    "endpoint health": ("hive endpoint health default/web",),
    "endpoint labels": ("hive endpoint labels default/web", "hive endpoint labels 17 --add tier=front"),
    "endpoint list": ("hive endpoint list", "hive endpoint list -o wide", "hive endpoint list -o json"),
    "endpoint log": ("hive endpoint log default/web",),
    "fqdn cache clean": ("hive fqdn cache clean", "hive fqdn cache clean -p '*.example.com'"),
    "fqdn cache list": ("hive fqdn cache list", "hive fqdn cache list -e default/web"),
    "fqdn names": ("hive fqdn names",),
    "health": ("hive health", "hive health -o json"),
    "identity get": ("hive identity get 4",),
    "identity list": ("hive identity list", "hive identity list k8s:app=web"),
    "ip get": ("hive ip get 10.0.1.7",),
    "ip list": ("hive ip list", "hive ip list -o json"),
    "inspect": (
        "hive inspect --format html > hive.html",
        "hive inspect --live --timeline",
        "hive inspect --circles",
    ),
    "kubernetes status": ("hive kubernetes status",),
    "lab apply": ("hive lab apply --wait -f policy.yaml",),
    "lab check": ("hive lab check", "hive lab check --skip mtu --json"),
    "lab crash": ("hive lab crash",),
    "lab delete": ("hive lab delete -f policy.yaml", "hive lab delete service web"),
    "lab demo": ("hive lab demo", "hive lab demo --part 3"),
    "lab down": ("hive lab down",),
    "lab exec": (
        "hive lab exec -- hive status",
        "hive lab exec --pod pod-1 -- ping -c1 192.168.50.10",
    ),
    "lab get": ("hive lab get", "hive lab get service web -o yaml"),
    "lab list": ("hive lab list",),
    "lab path": ("hive lab path",),
    "lab restart": ("hive lab restart", "hive lab restart --enable-policy=always"),
    "lab up": ("hive lab up", "hive lab up --nodes 2", "hive lab up --pods 3 -- --enable-ipv6=true"),
    "map events": ("hive map events cilium_ipcache", "hive map events cilium_lxc -f"),
    "map get": ("hive map get cilium_lxc",),
    "map list": ("hive map list",),
    "monitor": (
        "hive monitor -t drop",
        "hive monitor --pod default/web",
        "hive monitor --since 10m --verdict dropped --namespace default",
        "hive monitor -n --from default/web --to 10.0.2.0/24",
    ),
    "mount-bpffs": ("hive mount-bpffs",),
    "mount-cgroup": ("hive mount-cgroup /run/cilium/cgroupv2",),
    "node list": ("hive node list", "hive node list -o wide"),
    "observe": (
        "hive observe --verdict DROPPED --last 20 --why",
        "hive observe --pod default/web --follow",
        "hive observe --protocol dns -o json",
    ),
    "probe serve": ("hive probe serve --name web --port 8080",),
    "probe try": (
        'hive probe try \'[{"kind": "connect", "to": "192.0.2.10", "port": 443}]\'',
        'hive probe try \'[{"kind": "mtu", "to": "10.0.1.7", "port": 8080}]\'',
    ),
    "service get": ("hive service get default/web", "hive service get 10.96.0.1:443"),
    "service list": ("hive service list", "hive service list web"),
    "shell": ("hive shell", "hive shell db/show health", "hive shell metrics conntrack"),
    "operator run": ("hive operator run --config-dir=/tmp/cilium/config-map",),
    "operator status": ("hive operator status",),
    "policy check": ("hive policy check manifests",),
    "policy explain": (
        "hive policy explain default/web default/db:5432",
        "hive policy explain default/web example.com:443",
        "hive policy explain --context staging default/web default/db:5432",
        "hive policy explain --manifests manifests world default/web:http",
    ),
    "policy get": ("hive policy get",),
    "policy list": ("hive policy list", "hive policy list --refused"),
    "policy selectors": ("hive policy selectors",),
    "policy try": ("hive policy try policy.yaml", "hive policy try --since 1h policies"),
    "policy wait": ("hive policy wait 7",),
    "status": ("hive status", "hive status --verbose", "hive status --brief --wait ok"),
    "sysctlfix": ("hive sysctlfix",),
    "ui": ("hive ui", "hive ui --no-browser --port 12000"),
    "version": ("hive version", "hive version -o json"),
}
"""Words of a command, without ``hive`` -> its examples."""


def add_examples(command: click.Command, words: tuple[str, ...]) -> None:
    """Append the examples of a command, or of all commands of a group, to its help.

    A group lists the whole first sentence of each of its commands, which click would cut.
    """
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            child.short_help = child.get_short_help_str(limit=1000)
            add_examples(child, (*words, name))
    elif command.epilog is None and (lines := EXAMPLES.get(" ".join(words))):
        command.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
