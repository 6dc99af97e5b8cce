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

{{/* What a value is: {"value": ...} as JSON, for a path with dots, of .values. */}}
{{- define "cilium.at" -}}
{{- $found := .values -}}
{{- range splitList "." .path -}}
{{- if kindIs "map" $found -}}{{- $found = get $found . -}}{{- else -}}{{- $found = "" -}}{{- end -}}
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

{{/* Fails for values that mean nothing here, and for what is not built. One template includes it: Helm renders all. */}}
{{- define "cilium.check" -}}
{{- $known := .Files.Get "files/known.txt" | trim | splitList "\n" -}}
{{- $open := .Files.Get "files/open.txt" | trim | splitList "\n" -}}
{{- $cilium := .Files.Get "files/cilium.txt" | trim | splitList "\n" -}}
{{- $values := omit .Values "global" -}}
{{- range $path := include "cilium.paths" (dict "at" "" "values" $values) | trim | splitList "\n" -}}
{{- $served := has $path $known -}}
{{- range $open -}}{{- if or (eq $path .) (hasPrefix (printf "%s." .) $path) -}}{{- $served = true -}}{{- end -}}{{- end -}}
{{- if not $served -}}
{{- $value := get (include "cilium.at" (dict "values" $values "path" $path) | fromJson) "value" -}}
{{- $of := "" -}}
{{- range $cilium -}}{{- if or (eq $path .) (hasPrefix (printf "%s." .) $path) (hasPrefix (printf "%s." $path) .) -}}{{- $of = . -}}{{- end -}}{{- end -}}
{{- if not $of -}}
{{- fail (printf "%s: no value of this chart, nor of Cilium's: see values.yaml for those there are, extraConfig for settings without one" $path) -}}
{{- else if and $value (ne (toString $value) "0") -}}
{{- fail (printf "%s: a value of Cilium's chart that is not served here yet: leave it out (docs/status.md says what works)" $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not (has (.Values.routingMode | default "native") (list "native" "tunnel")) -}}
{{- fail (printf "routingMode=%s: not served here: expected native or tunnel, or leave it out" .Values.routingMode) -}}
{{- end -}}
{{- if and (eq .Values.routingMode "tunnel") .Values.autoDirectNodeRoutes -}}
{{- fail "routingMode=tunnel: not served here with autoDirectNodeRoutes: leave one of them out" -}}
{{- end -}}
{{- if not (has (.Values.tunnelProtocol | default "vxlan") (list "vxlan")) -}}
{{- fail (printf "tunnelProtocol=%s: not served here yet: expected vxlan, or leave it out" .Values.tunnelProtocol) -}}
{{- end -}}
{{- if not (has .Values.ipam.mode (list "cluster-pool" "kubernetes" "delegated-plugin")) -}}
{{- fail (printf "ipam.mode=%s: not served here yet: expected cluster-pool or kubernetes" .Values.ipam.mode) -}}
{{- end -}}
{{- if ne .Values.identityAllocationMode "crd" -}}
{{- fail (printf "identityAllocationMode=%s: not served here yet: expected crd" .Values.identityAllocationMode) -}}
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
{{- if not (and (regexMatch "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$" .Values.cluster.name) (le (len .Values.cluster.name) 32)) -}}
{{- fail (printf "cluster.name=%s: The cluster name is invalid: expected at most 32 lower case letters, digits and '-'" .Values.cluster.name) -}}
{{- end -}}
{{- if and (eq (toString .Values.operator.setNodeTaints) "true") (not .Values.operator.removeNodeTaints) -}}
{{- fail "operator.setNodeTaints: Cannot have operator.setNodeTaintsMaxNodes and not operator.removeNodeTaints = false" -}}
{{- end -}}
{{- range $name, $text := dict "operator.endpointGCInterval" .Values.operator.endpointGCInterval "operator.nodeGCInterval" .Values.operator.nodeGCInterval "operator.identityGCInterval" .Values.operator.identityGCInterval "operator.identityHeartbeatTimeout" .Values.operator.identityHeartbeatTimeout "bpf.monitorInterval" .Values.bpf.monitorInterval "conntrackGCInterval" .Values.conntrackGCInterval "conntrackGCMaxInterval" .Values.conntrackGCMaxInterval "identityChangeGracePeriod" .Values.identityChangeGracePeriod -}}
{{- if and $text (not (regexMatch "^([0-9]+(\\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$" (toString $text))) -}}
{{- fail (printf "%s=%s: expected a duration such as 15s, 2m0s or 100ms" $name (toString $text)) -}}
{{- end -}}
{{- end -}}
{{- end }}
