{{- /* Certificates of agents and relay, as a JSON array: Secret, names, what it is for, what values hold of it. */}}
{{- define "cilium.certificates" -}}
{{- $found := list -}}
{{- $hubble := .Values.hubble -}}
{{- if .Values.agent -}}
{{- $cluster := .Values.cluster.name | replace "." "-" -}}
{{- $tls := include "cilium.hubbletls" . -}}
{{- if $tls -}}
{{- with $hubble.tls.server -}}
{{- $found = append $found (dict "at" "hubble.tls.server" "secret" "hubble-server-certs" "name" (printf "*.%s.hubble-grpc.cilium.io" $cluster) "dns" .extraDnsNames "ips" .extraIpAddresses "for" (list "server auth" "client auth") "cert" .cert "key" .key "existingSecret" .existingSecret) -}}
{{- end -}}
{{- end -}}
{{- if and $tls $hubble.relay.enabled -}}
{{- with $hubble.relay.tls.client -}}
{{- $found = append $found (dict "at" "hubble.relay.tls.client" "secret" "hubble-relay-client-certs" "name" "*.hubble-relay.cilium.io" "dns" list "ips" list "for" (list "client auth") "cert" .cert "key" .key "existingSecret" .existingSecret) -}}
{{- end -}}
{{- with $hubble.relay.tls.server -}}
{{- if .enabled -}}
{{- $found = append $found (dict "at" "hubble.relay.tls.server" "secret" "hubble-relay-server-certs" "name" "*.hubble-relay.cilium.io" "dns" .extraDnsNames "ips" .extraIpAddresses "for" (list "server auth") "cert" .cert "key" .key "existingSecret" .existingSecret) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $hubble.metrics.tls.server -}}
{{- if and (include "cilium.flowmetricstls" $) (or .cert .key (not .existingSecret)) -}}
{{- $found = append $found (dict "at" "hubble.metrics.tls.server" "secret" "hubble-metrics-server-certs" "name" (printf "%s.hubble-metrics.cilium.io" $cluster) "dns" .extraDnsNames "ips" .extraIpAddresses "for" (list "server auth") "cert" .cert "key" .key "existingSecret" .existingSecret) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ toJson $found }}
{{- end }}

{{- /* Fails for values of certificates that would be without effect, or that no one could use. */}}
{{- define "cilium.checkcertificates" -}}
{{- $auto := .Values.hubble.tls.auto -}}
{{- $ca := .Values.tls.ca -}}
{{- $certificates := include "cilium.certificates" . | fromJsonArray -}}
{{- if and $certificates $auto.enabled -}}
{{- if not (has $auto.method (list "helm" "cronJob" "certmanager")) -}}
{{- fail (printf "hubble.tls.auto.method=%s: not served here: expected helm, cronJob or certmanager" $auto.method) -}}
{{- end -}}
{{- if and (eq $auto.method "certmanager") (not $auto.certManagerIssuerRef) -}}
{{- fail "Hubble TLS certgen method=certmanager requires that user specifies .Values.hubble.tls.auto.certManagerIssuerRef" -}}
{{- end -}}
{{- if and (eq $auto.method "cronJob") (not (or .Values.certgen.image.repository .Values.certgen.image.override)) -}}
{{- fail "certgen.image.repository: name the image of Cilium's certgen, such as quay.io/cilium/certgen, and its tag" -}}
{{- end -}}
{{- if and (ne $auto.method "certmanager") $ca.cert (not $ca.key) -}}
{{- fail "tls.ca.key: expected the key of tls.ca.cert, since hubble.tls.auto signs with it" -}}
{{- end -}}
{{- end -}}
{{- range $certificates -}}
{{- $one := . -}}
{{- if or .cert .key -}}
{{- if $auto.enabled -}}
{{- fail (printf "%s.cert: hubble.tls.auto makes this certificate: set hubble.tls.auto.enabled=false, or leave it out" .at) -}}
{{- end -}}
{{- if .existingSecret -}}
{{- fail (printf "%s.cert: the certificate is that of %s.existingSecret: leave one out" .at .at) -}}
{{- end -}}
{{- range list "cert" "key" -}}
{{- $_ := required (printf "missing %s.%s" $one.at .) (get $one .) -}}
{{- include "cilium.checkpem" (dict "at" (printf "%s.%s" $one.at .) "value" (get $one .)) -}}
{{- end -}}
{{- if not $ca.cert -}}
{{- fail (printf "missing tls.ca.cert: %s.cert is verified by it" .at) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name := list "cert" "key" -}}
{{- with get $ca $name -}}{{- include "cilium.checkpem" (dict "at" (printf "tls.ca.%s" $name) "value" .) -}}{{- end -}}
{{- end -}}
{{- end }}

{{- define "cilium.checkpem" -}}
{{- if not (contains "-----BEGIN " (.value | b64dec)) -}}
{{- fail (printf "%s: expected a PEM file in base64" .at) -}}
{{- end -}}
{{- end }}

{{- /* The authority of certificates that Helm makes: of values, or of the Secret, so that old certificates stay good. */}}
{{- define "cilium.ca" -}}
{{- $given := .Values.tls.ca -}}
{{- $held := lookup "v1" "Secret" (include "cilium.namespace" .) "cilium-ca" -}}
{{- if $given.cert -}}
{{- toJson (dict "cert" ($given.cert | b64dec) "key" ($given.key | b64dec)) -}}
{{- else if and $held $held.data -}}
{{- toJson (dict "cert" (index $held.data "ca.crt" | b64dec) "key" (index $held.data "ca.key" | b64dec)) -}}
{{- else -}}
{{- $ca := genCA "Cilium CA" (int $given.certValidityDuration) -}}
{{- toJson (dict "cert" $ca.Cert "key" $ca.Key) -}}
{{- end -}}
{{- end }}

{{- /* What a Job of certgen does: make the authority if there is none, and all certificates anew. */}}
{{- define "cilium.certgen" -}}
{{- $namespace := include "cilium.namespace" . -}}
{{- $validity := printf "%dh" (mul .Values.hubble.tls.auto.certValidityDuration 24) -}}
{{- $certs := list -}}
{{- range include "cilium.certificates" . | fromJsonArray -}}
{{- $certs = append $certs (dict "name" .secret "namespace" $namespace "commonName" .name "hosts" (concat (list .name) .dns .ips) "usage" (concat (list "signing" "key encipherment") .for) "validity" $validity) -}}
{{- end -}}
{{- $account := .Values.serviceAccounts.hubblecertgen -}}
{{- with .Values.certgen -}}
template:
  metadata:
    labels:
      k8s-app: hubble-generate-certs
      {{- with .podLabels }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
  spec:
    securityContext: {seccompProfile: {type: RuntimeDefault}}
    containers:
    - name: certgen
      image: {{ include "cilium.image" .image | quote }}
      imagePullPolicy: {{ .image.pullPolicy }}
      securityContext: {capabilities: {drop: [ALL]}, allowPrivilegeEscalation: false}
      {{- with .resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      command: [/usr/bin/cilium-certgen]
      # Arguments, not a ConfigMap: the pod of a run shows what it ran with.
      args:
      {{- if $.Values.debug.enabled }}
      - --debug
      {{- end }}
      - --ca-generate={{ .generateCA }}
      - --ca-reuse-secret
      - --ca-secret-namespace={{ $namespace }}
      - --ca-secret-name=cilium-ca
      - --ca-common-name=Cilium CA
      env:
      - name: CILIUM_CERTGEN_CONFIG
        value: |
          {{- dict "certs" $certs | toYaml | nindent 10 }}
      {{- with .extraVolumeMounts }}
      volumeMounts:
        {{- toYaml . | nindent 6 }}
      {{- end }}
    hostNetwork: false
    restartPolicy: OnFailure
    serviceAccountName: {{ $account.name | quote }}
    automountServiceAccountToken: {{ $account.automount }}
    {{- with .priorityClassName }}
    priorityClassName: {{ . }}
    {{- end }}
    {{- with .nodeSelector }}
    nodeSelector:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with .tolerations }}
    tolerations:
      {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with .affinity }}
    affinity:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $.Values.imagePullSecrets }}
    imagePullSecrets:
      {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with .extraVolumes }}
    volumes:
      {{- toYaml . | nindent 4 }}
    {{- end }}
{{- with .ttlSecondsAfterFinished }}
ttlSecondsAfterFinished: {{ include "cilium.text" . }}
{{- end }}
{{- end -}}
{{- end }}

{{- /*
Sources of a projected volume: a certificate with its key, and the authorities that verify the other side, of the same
Secret or of tls.caBundle. (list ROOT SECRET OPTIONAL FILES AUTHORITIES), where FILES are key to name and AUTHORITIES is a
name, or "" for none.
*/}}
{{- define "cilium.certificatesources" -}}
{{- $bundle := (index . 0).Values.tls.caBundle -}}
{{- $optional := index . 2 -}}
{{- $authorities := index . 4 -}}
- secret:
    name: {{ index . 1 }}
    {{- if $optional }}
    optional: true
    {{- end }}
    items:
    {{- range index . 3 }}
    - {key: {{ index . 0 }}, path: {{ index . 1 }}}
    {{- end }}
    {{- if and $authorities (not $bundle.enabled) }}
    - {key: ca.crt, path: {{ $authorities }}}
    {{- end }}
{{- if and $authorities $bundle.enabled }}
- {{ ternary "secret" "configMap" $bundle.useSecret }}:
    name: {{ $bundle.name }}
    {{- if $optional }}
    optional: true
    {{- end }}
    items: [{key: {{ $bundle.key | quote }}, path: {{ $authorities }}}]
{{- end }}
{{- end }}
