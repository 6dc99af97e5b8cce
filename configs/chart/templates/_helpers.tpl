{{/* The namespace of everything. */}}
{{- define "cilium.namespace" -}}
{{ .Values.namespaceOverride | default .Release.Namespace }}
{{- end }}

{{/* An image: override, or repository:tag, or repository:tag@digest. */}}
{{- define "cilium.image" -}}
{{- if .override -}}{{ .override }}
{{- else -}}
{{ .repository }}{{ with .tag }}:{{ . }}{{ end }}{{ if and .useDigest .digest }}@{{ .digest }}{{ end }}
{{- end -}}
{{- end }}

{{/* What a value is: {"value": ...} as JSON, for a path with dots, of .values. One that is not there is "", or null if .absent. */}}
{{- define "cilium.at" -}}
{{- $found := .values -}}
{{- $none := ternary nil "" (default false .absent) -}}
{{- range splitList "." .path -}}
{{- if and (kindIs "map" $found) (or (not $.absent) (hasKey $found .)) -}}{{- $found = get $found . -}}{{- else -}}{{- $found = $none -}}{{- end -}}
{{- end -}}
{{ dict "value" $found | toJson }}
{{- end }}

{{/* A value as the text of a key: numbers without an exponent, lists with blanks between. */}}
{{- define "cilium.text" -}}
{{- if kindIs "slice" . -}}{{ join " " . }}
{{- else if kindIs "map" . -}}{{ toJson . }}
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}{{ int64 . }}
{{- else -}}{{ toString . }}
{{- end -}}
{{- end }}

{{/* Labels that every object has besides its own. */}}
{{- define "cilium.labels" -}}
app.kubernetes.io/part-of: cilium
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Annotations, where there are any, and the labels of every object, for its metadata. */}}
{{- define "cilium.described" -}}
{{- with .annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
labels:
  {{- include "cilium.labels" .of | nindent 2 }}
{{- end }}

{{/* Where the API server is, as variables of a container. */}}
{{- define "cilium.apiserver" -}}
{{- with .Values.k8sServiceHost }}
- {name: KUBERNETES_SERVICE_HOST, value: {{ . | quote }}}
{{- end }}
{{- with .Values.k8sServicePort }}
- {name: KUBERNETES_SERVICE_PORT, value: {{ include "cilium.text" . | quote }}}
{{- end }}
{{- end }}

{{/* What a container may do: everything, or the capabilities of .add alone. */}}
{{- define "cilium.privileges" -}}
{{- if .of.privileged }}
privileged: true
{{- else }}
seLinuxOptions:
  {{- toYaml .of.seLinuxOptions | nindent 2 }}
capabilities:
  drop: [ALL]
  {{- with .add }}
  add:
  {{- $for := dict "NET_RAW" "answers of the DNS proxy, announcements, probes of nodes" "NET_ADMIN" "links, addresses, routes, filters" "SYS_ADMIN" "bpf(2), mounts, namespaces of the node" "SYS_CHROOT" "setns(2) to a mount namespace asks for it" "SYS_PTRACE" "opens the namespaces of the node's first process" }}
  {{- range . }}
  - {{ . }}{{ with get $for . }}  # {{ . }}{{ end }}
  {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Mounts of paths of the node, and their volumes. */}}
{{- define "cilium.hostmounts" -}}
{{- range . }}
- name: {{ .name }}
  mountPath: {{ .mountPath }}
  {{- if hasKey . "readOnly" }}
  readOnly: {{ .readOnly }}
  {{- end }}
  {{- with .mountPropagation }}
  mountPropagation: {{ . }}
  {{- end }}
{{- end }}
{{- end }}
{{- define "cilium.hostvolumes" -}}
{{- range . }}
- name: {{ .name }}
  hostPath:
    path: {{ .hostPath }}
    {{- with .hostPathType }}
    type: {{ . }}
    {{- end }}
{{- end }}
{{- end }}

{{/* Variables of the containers that read settings. */}}
{{- define "cilium.agentenv" -}}
- name: K8S_NODE_NAME
  valueFrom: {fieldRef: {apiVersion: v1, fieldPath: spec.nodeName}}
- name: CILIUM_K8S_NAMESPACE
  valueFrom: {fieldRef: {apiVersion: v1, fieldPath: metadata.namespace}}
{{- include "cilium.apiserver" . | nindent 0 }}
{{- with .Values.extraEnv }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end }}

{{/* Names of remote clusters' addresses, for pods of the node's network. */}}
{{- define "cilium.hostaliases" -}}
{{- $found := list }}
{{- if .Values.clustermesh.config.enabled }}
{{- range $cluster := .Values.clustermesh.config.clusters }}
{{- range $cluster.ips }}
{{- $found = append $found (dict "ip" . "hostnames" (list (printf "%s.%s" $cluster.name $.Values.clustermesh.config.domain))) }}
{{- end }}
{{- end }}
{{- end }}
{{- with $found }}
hostAliases:
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The file that kvstore-opt names: where etcd is, and what it is trusted by. */}}
{{- define "cilium.etcd" -}}
---
endpoints:
{{- range .Values.etcd.endpoints }}
  - {{ . }}
{{- end }}
{{- if .Values.etcd.ssl }}
trusted-ca-file: '/var/lib/etcd-secrets/etcd-client-ca.crt'
key-file: '/var/lib/etcd-secrets/etcd-client.key'
cert-file: '/var/lib/etcd-secrets/etcd-client.crt'
{{- end }}
{{- end }}

{{/* Where a container finds it, and the volumes. */}}
{{- define "cilium.etcdmounts" -}}
{{- if .Values.etcd.enabled }}
- {name: etcd-config-path, mountPath: /var/lib/etcd-config, readOnly: true}
{{- if .Values.etcd.ssl }}
- {name: etcd-secrets, mountPath: /var/lib/etcd-secrets, readOnly: true}
{{- end }}
{{- end }}
{{- end }}
{{- define "cilium.etcdvolumes" -}}
{{- if .Values.etcd.enabled }}
- name: etcd-config-path
  configMap: {name: cilium-config, defaultMode: 256, items: [{key: etcd-config, path: etcd.config}]}
{{- if .Values.etcd.ssl }}
- name: etcd-secrets
  secret: {secretName: cilium-etcd-secrets, defaultMode: 256, optional: true}
{{- end }}
{{- end }}
{{- end }}

{{/* Where agents' settings come from, the strongest last. */}}
{{- define "cilium.configsources" -}}
{{ .Values.daemon.configSources | default "directory:/etc/cilium/config-map,cilium-node-config" }}
{{- end }}

{{/* What daemon.configSources asks an API server for: {"cluster", "node", "maps": {namespace: [name]}} as JSON. */}}
{{- define "cilium.sources" -}}
{{- $here := include "cilium.namespace" . -}}
{{- $found := dict "cluster" false "node" false "maps" dict -}}
{{- range splitList "," (include "cilium.configsources" .) -}}
{{- if . -}}
{{- $kind := splitList ":" . | first -}}
{{- $rest := trimPrefix $kind . | trimPrefix ":" -}}
{{- $place := splitList "/" $rest -}}
{{- if not (has $kind (list "config-map" "cilium-node-config" "node" "directory")) -}}
{{- fail (printf "daemon.configSources: %s: expected one of config-map, cilium-node-config, node, directory, then :[namespace/]name" .) -}}
{{- end -}}
{{- if and (eq $kind "directory") (not $rest) -}}
{{- fail "daemon.configSources: directory: expected a path after the colon, such as directory:/etc/cilium/config-map" -}}
{{- end -}}
{{- if ne $kind "directory" -}}{{- $_ := set $found "cluster" true -}}{{- end -}}
{{- if or (eq $kind "node") (and (eq $kind "cilium-node-config") (or (lt (len $place) 2) (not (last $place)))) -}}
{{- $_ := set $found "node" true -}}
{{- end -}}
{{- if eq $kind "config-map" -}}
{{- $namespace := ternary (first $place) $here (gt (len $place) 1) | default $here -}}
{{- $names := get $found.maps $namespace | default list -}}
{{- $_ := set $found.maps $namespace (append $names (last $place | default "cilium-config") | uniq) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ toJson $found }}
{{- end }}

{{/* Every path of a value that is no map, or an empty one, a line each. */}}
{{- define "cilium.paths" -}}
{{- $at := .at -}}
{{- range $name, $value := .values }}
{{- $path := ternary $name (printf "%s.%s" $at $name) (eq $at "") }}
{{- if and (kindIs "map" $value) (not (empty $value)) }}
{{- include "cilium.paths" (dict "at" $path "values" $value) }}
{{- else }}
{{ $path }}
{{- end }}
{{- end }}
{{- end }}

{{/*
"true" for a cluster whose first Cilium was .version or later, which is what no upgradeCompatibility means, else "".
As in Cilium's chart, a pre-release such as 1.16.0-rc.1 is later than none.
*/}}
{{- define "cilium.since" -}}
{{- if semverCompare (printf ">=%s" .version) (.values.upgradeCompatibility | default .version) -}}true{{- end -}}
{{- end }}

{{/* "true" where Envoy has a pod of its own on every node, else "". */}}
{{- define "cilium.envoy" -}}
{{- $since := include "cilium.since" (dict "values" .Values "version" "1.16") -}}
{{- if and .Values.l7Proxy (ternary (not (empty $since)) (not (empty .Values.envoy.enabled)) (kindIs "invalid" .Values.envoy.enabled)) -}}
true
{{- end -}}
{{- end }}

{{/* The values that are taken and change nothing: the paths that are set of those in files/without-effect.txt. */}}
{{- define "cilium.withouteffect" -}}
{{- $values := .Values -}}
{{- $found := list -}}
{{- range .Files.Get "files/without-effect.txt" | trim | splitList "\n" -}}
{{- $value := get (include "cilium.at" (dict "values" $values "path" .) | fromJson) "value" -}}
{{- if and (not (empty $value)) (ne (toString $value) "0") -}}{{- $found = append $found . -}}{{- end -}}
{{- end -}}
{{ join ", " $found }}
{{- end }}

{{/* Fails for values that mean nothing here, and for what is not built. One template includes it: Helm renders all. */}}
{{- define "cilium.hubbletls" -}}
{{- with .Values.hubble -}}{{- if and .enabled .listenAddress .tls.enabled -}}true{{- end -}}{{- end -}}
{{- end }}

{{- /* "true" where agents serve metrics of flows; and where they do with TLS. */}}
{{- define "cilium.flowmetrics" -}}
{{- with .Values.hubble -}}{{- if and .enabled (or .metrics.enabled .metrics.dynamic.enabled) -}}true{{- end -}}{{- end -}}
{{- end }}
{{- define "cilium.flowmetricstls" -}}
{{- if and (include "cilium.flowmetrics" .) .Values.hubble.metrics.tls.enabled -}}true{{- end -}}
{{- end }}

{{- define "cilium.check" -}}
{{- $known := dict -}}
{{- range .Files.Get "files/known.txt" | trim | splitList "\n" -}}{{- $_ := set $known . true -}}{{- end -}}
{{- $open := dict -}}
{{- range concat (.Files.Get "files/open.txt" | trim | splitList "\n") (.Files.Get "files/without-effect.txt" | trim | splitList "\n") -}}{{- $_ := set $open . true -}}{{- end -}}
{{- $cilium := .Files.Get "files/cilium.txt" | trim | splitList "\n" -}}
{{- $fixed := dict -}}
{{- range .Files.Get "files/fixed.yaml" | fromYamlArray -}}{{- $_ := set $fixed .value . -}}{{- end -}}
{{- $values := omit .Values "global" -}}
{{- range .Files.Get "files/removed.yaml" | fromYamlArray -}}
{{- $text := .text -}}
{{- range .values -}}
{{- if not (kindIs "invalid" (get (include "cilium.at" (dict "values" $values "path" . "absent" true) | fromJson) "value")) -}}
{{- fail $text -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range .Files.Get "files/needed.txt" | trim | splitList "\n" -}}
{{- $held := $values -}}
{{- $there := true -}}
{{- range splitList "." . -}}
{{- if and $there (kindIs "map" $held) (hasKey $held .) -}}{{- $held = get $held . -}}{{- else -}}{{- $there = false -}}{{- end -}}
{{- end -}}
{{- if or (not $there) (kindIs "invalid" $held) -}}
{{- fail (printf "%s=null: expected a value, or leave it out" .) -}}
{{- end -}}
{{- end -}}
{{- include "cilium.refusals" . -}}
{{- range $path := include "cilium.paths" (dict "at" "" "values" $values) | trim | splitList "\n" -}}
{{- $served := hasKey $known $path -}}
{{- if not $served -}}
{{- $above := list -}}
{{- range splitList "." $path -}}
{{- $above = append $above . -}}
{{- if hasKey $open (join "." $above) -}}{{- $served = true -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if not $served -}}
{{- $value := get (include "cilium.at" (dict "values" $values "path" $path) | fromJson) "value" -}}
{{- $one := get $fixed $path | default dict -}}
{{- $of := "" -}}
{{- range $cilium -}}{{- if or (eq $path .) (hasPrefix (printf "%s." .) $path) (hasPrefix (printf "%s." $path) .) -}}{{- $of = . -}}{{- end -}}{{- end -}}
{{- if not $of -}}
{{- fail (printf "%s: no value of this chart, nor of Cilium's: see values.yaml for those there are, extraConfig for settings without one" $path) -}}
{{- else if and $one (eq (toString $value) (toString $one.is)) -}}
{{- else if and $one.refuse (ne (toString $value) "") -}}
{{- fail (printf "%s=%s: not served here: expected %s, or leave it out" $path (toString $value) (toString $one.is)) -}}
{{- else if and $value (ne (toString $value) "0") -}}
{{- fail (printf "%s: a value of Cilium's chart that is not served here yet: leave it out (docs/start/status.md says what works)" $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not (has (.Values.routingMode | default "tunnel") (list "native" "tunnel")) -}}
{{- fail (printf "routingMode=%s: not served here: expected native or tunnel, or leave it out" .Values.routingMode) -}}
{{- end -}}
{{- if and (ne .Values.routingMode "native") .Values.autoDirectNodeRoutes -}}
{{- fail "autoDirectNodeRoutes=true: needs routingMode=native, since packets to other nodes go through the tunnel otherwise" -}}
{{- end -}}
{{- if and .Values.aksbyocni.enabled (ne (.Values.ipam.mode | default "cluster-pool") "cluster-pool") -}}
{{- fail (printf "ipam.mode=%s: not served here with aksbyocni.enabled: expected cluster-pool, or leave it out" .Values.ipam.mode) -}}
{{- end -}}
{{- if not (has (.Values.tunnelProtocol | default "vxlan") (list "vxlan" "geneve")) -}}
{{- fail (printf "tunnelProtocol=%s: not served here: expected vxlan or geneve, or leave it out" .Values.tunnelProtocol) -}}
{{- end -}}
{{- if not (has (.Values.underlayProtocol | default "ipv4") (list "ipv4" "ipv6")) -}}
{{- fail (printf "underlayProtocol=%s: not served here: expected ipv4 or ipv6, or leave it out" .Values.underlayProtocol) -}}
{{- end -}}
{{- if not (has (.Values.ipam.mode | default "cluster-pool") (list "cluster-pool" "kubernetes" "multi-pool" "delegated-plugin")) -}}
{{- fail (printf "ipam.mode=%s: not served here yet: expected cluster-pool, kubernetes, multi-pool or delegated-plugin" .Values.ipam.mode) -}}
{{- end -}}
{{- if and (has .Values.identityAllocationMode (list "kvstore" "doublewrite-readcrd" "doublewrite-readkvstore")) (not .Values.etcd.enabled) -}}
{{- fail (printf "identityAllocationMode=%s: agents need a store to agree by: set etcd.enabled and etcd.endpoints" .Values.identityAllocationMode) -}}
{{- end -}}
{{- include "cilium.checkcertificates" . -}}
{{- with .Values.hubble -}}
{{- if .enabled -}}
{{- if and .metrics.enabled .metrics.dynamic.enabled -}}
{{- fail "hubble.metrics.enabled: agents count flows by this list or by the file of hubble.metrics.dynamic: leave one out" -}}
{{- end -}}
{{- if and .redact.http.headers.allow .redact.http.headers.deny -}}
{{- fail "Only one of .Values.hubble.redact.http.headers.allow, .Values.hubble.redact.http.headers.deny can be specified" -}}
{{- end -}}
{{- end -}}
{{- if .relay.enabled -}}
{{- if not .listenAddress -}}
{{- fail "hubble.relay.enabled=true: agents have no address for it: set hubble.listenAddress, such as :4244" -}}
{{- end -}}
{{- if not .relay.image.repository -}}
{{- fail "hubble.relay.image.repository: name the image of Cilium's hubble-relay, such as quay.io/cilium/hubble-relay, and its tag" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $kpr := .Values.kubeProxyReplacement -}}
{{- with .Values.upgradeCompatibility -}}
{{- if not (regexMatch "^v?[0-9]+([.][0-9]+){0,2}(-[0-9A-Za-z.-]+)?([+][0-9A-Za-z.-]+)?$" .) -}}
{{- fail (printf "upgradeCompatibility=%s: expected a version of Cilium such as \"1.14\"" .) -}}
{{- end -}}
{{- end -}}
{{- $of8 := include "cilium.since" (dict "values" $values "version" "1.8") -}}
{{- $of14 := include "cilium.since" (dict "values" $values "version" "1.14") -}}
{{- if and $of8 (not $of14) (or (kindIs "invalid" $kpr) (eq (toString $kpr) "")) -}}
{{- fail "kubeProxyReplacement must be explicitly set to a valid value (true or false) to continue." -}}
{{- end -}}
{{- if not (or (kindIs "invalid" $kpr) (has (toString $kpr) (list "" "true" "false"))) -}}
{{- fail "kubeProxyReplacement must be explicitly set to a valid value (true or false) to continue." -}}
{{- end -}}
{{- range .Files.Get "files/settings.yaml" | fromYamlArray -}}
{{- if .only -}}
{{- $text := include "cilium.text" (get (include "cilium.at" (dict "values" $values "path" .value) | fromJson) "value") -}}
{{- $told := list -}}
{{- range .only -}}{{- $told = append $told (include "cilium.text" .) -}}{{- end -}}
{{- if not (has $text (concat $told (list "" "<nil>"))) -}}
{{- fail (printf "%s=%s: not served here yet: expected %s, or leave it out" .value $text (join " or " $told)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (kindIs "bool" .Values.bpf.masquerade) (not .Values.bpf.masquerade) (or .Values.enableIPv4Masquerade .Values.enableIPv6Masquerade) -}}
{{- fail "bpf.masquerade=false: masquerading by iptables is not served here: leave it out, or set enableIPv4Masquerade=false and enableIPv6Masquerade=false" -}}
{{- end -}}
{{- if not (has (.Values.cni.chainingMode | default "none") (list "none" "aws-cni" "azure" "flannel" "generic-veth" "portmap")) -}}
{{- fail (printf "cni.chainingMode=%s: not served here: expected none, aws-cni, azure, flannel, generic-veth or portmap" .Values.cni.chainingMode) -}}
{{- end -}}
{{- if not (or .Values.ipv4.enabled .Values.ipv6.enabled) -}}
{{- fail "ipv4.enabled, ipv6.enabled: pods need addresses of one family at least" -}}
{{- end -}}
{{- if not (has .Values.scheduling.mode (list "anti-affinity" "kube-scheduler")) -}}
{{- fail (printf "scheduling.mode=%s: expected anti-affinity or kube-scheduler" .Values.scheduling.mode) -}}
{{- end -}}
{{- $durations := dict "ipam.ciliumNodeUpdateRate" .Values.ipam.ciliumNodeUpdateRate "operator.endpointGCInterval" .Values.operator.endpointGCInterval "operator.nodeGCInterval" .Values.operator.nodeGCInterval "operator.identityGCInterval" .Values.operator.identityGCInterval "operator.identityHeartbeatTimeout" .Values.operator.identityHeartbeatTimeout "bpf.monitorInterval" .Values.bpf.monitorInterval "conntrackGCInterval" .Values.conntrackGCInterval "conntrackGCMaxInterval" .Values.conntrackGCMaxInterval "identityChangeGracePeriod" .Values.identityChangeGracePeriod -}}
{{- $_ := set $durations "authentication.gcInterval" (get (include "cilium.at" (dict "values" $values "path" "authentication.gcInterval") | fromJson) "value") -}}
{{- if and .Values.encryption.enabled (ne (toString .Values.encryption.type) "wireguard") -}}
{{- $_ := set $durations "encryption.ipsec.keyRotationDuration" .Values.encryption.ipsec.keyRotationDuration -}}
{{- end -}}
{{- range $name, $text := $durations -}}
{{- if and $text (not (regexMatch "^[-+]?(0|(([0-9]+\\.?[0-9]*|\\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+)$" (toString $text))) -}}
{{- fail (printf "%s=%s: expected a duration such as 15s, 2m0s or 100ms" $name (toString $text)) -}}
{{- end -}}
{{- end -}}
{{- end }}
