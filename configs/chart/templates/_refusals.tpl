{{/* What Cilium's chart refuses, in its words: values that contradict each other, of features that are not served here, too. */}}
{{- define "cilium.refusals" -}}
{{- $value := dict -}}
{{- range list "alibabacloud.enabled" "authentication.enabled" "authentication.mutual.spire.enabled" "clustermesh.apiserver.tls.auto.certManagerIssuerRef" "clustermesh.apiserver.tls.auto.enabled" "clustermesh.apiserver.tls.auto.method" "clustermesh.maxConnectedClusters" "clustermesh.useAPIServer" "eni.enabled" "envoy.baseID" "envoyConfig.enabled" "externalWorkloads.enabled" "gatewayAPI.enabled" "gatewayAPI.externalTrafficPolicy" "gke.enabled" "hubble.enabled" "hubble.relay.enabled" "hubble.relay.tls.server.enabled" "hubble.ui.enabled" "hubble.ui.standalone.enabled" "hubble.ui.standalone.tls.certsVolume" "ingressController.enabled" "ingressController.service.externalTrafficPolicy" "ingressController.service.type" "keepDeprecatedLabels" "loadBalancer.l7.backend" "hubble.ui.backend.image.tag" "hubble.ui.frontend.image.tag" -}}
{{- $_ := set $value . (get (include "cilium.at" (dict "values" $.Values "path" . "absent" true) | fromJson) "value") -}}
{{- end -}}
{{- $ui := get $value "hubble.ui.enabled" -}}
{{- $standalone := get $value "hubble.ui.standalone.enabled" -}}
{{- if and $ui (not $standalone) (not (get $value "hubble.relay.enabled")) -}}
{{- fail "Hubble UI requires .Values.hubble.relay.enabled=true" -}}
{{- end -}}
{{- if and $ui $standalone (get $value "hubble.relay.tls.server.enabled") (not (get $value "hubble.ui.standalone.tls.certsVolume")) -}}
{{- fail "Hubble UI in standalone with Hubble Relay server TLS enabled requires providing .Values.hubble.ui.standalone.tls.certsVolume for mounting client certificates in the backend pod" -}}
{{- end -}}
{{- if and (get $value "hubble.relay.enabled") (not (get $value "hubble.enabled")) -}}
{{- fail "Hubble Relay requires .Values.hubble.enabled=true" -}}
{{- end -}}
{{- if $ui -}}
{{- range list "backend" "frontend" -}}
{{- $tag := get $value (printf "hubble.ui.%s.image.tag" .) | default "" | regexFind "^v?[0-9]+([.][0-9]+)*" -}}
{{- if $tag -}}{{- if semverCompare "<0.9.0" $tag -}}
{{- fail (printf "Hubble UI requires hubble.ui.%s.image.tag to be '>=v0.9.0'" .) -}}
{{- end -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- range list "clustermesh.useAPIServer" "externalWorkloads.enabled" -}}
{{- if get $value . -}}
{{- $what := ternary "The clustermesh-apiserver" "External workloads support" (eq . "clustermesh.useAPIServer") -}}
{{- $hint := ternary ". To establish a Cluster Mesh, directly configure the parameters to access the remote kvstore through .Values.clustermesh.config" "" (eq . "clustermesh.useAPIServer") -}}
{{- if ne ($.Values.identityAllocationMode | default "crd") "crd" -}}
{{- fail (printf "%s cannot be enabled in combination with .Values.identityAllocationMode=%s%s" $what $.Values.identityAllocationMode $hint) -}}
{{- end -}}
{{- if $.Values.disableEndpointCRD -}}
{{- fail (printf "%s cannot be enabled in combination with .Values.disableEndpointCRD=true" $what) -}}
{{- end -}}
{{- if and (eq (toString (get $value "clustermesh.apiserver.tls.auto.method")) "certmanager") (not (eq (toString (get $value "clustermesh.apiserver.tls.auto.enabled")) "false")) (not (get $value "clustermesh.apiserver.tls.auto.certManagerIssuerRef")) -}}
{{- fail "ClusterMesh TLS certgen method=certmanager requires that user specifies .Values.clustermesh.apiserver.tls.auto.certManagerIssuerRef" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $clusters := get $value "clustermesh.maxConnectedClusters" -}}
{{- if not (or (kindIs "invalid" $clusters) (has (include "cilium.text" $clusters) (list "255" "511"))) -}}
{{- fail "max-connected-clusters must be set to 255 or 511" -}}
{{- end -}}
{{- if and (get $value "authentication.mutual.spire.enabled") (eq (toString (get $value "authentication.enabled")) "false") -}}
{{- fail "SPIRE integration requires .Values.authentication.enabled=true and .Values.authentication.mutual.spire.enabled=true" -}}
{{- end -}}
{{- with get $value "envoy.baseID" -}}
{{- if or (lt (float64 .) 0.0) (gt (float64 .) 4294967295.0) -}}
{{- fail "envoy.baseID must be an int. Supported values 0 - 4294967295" -}}
{{- end -}}
{{- end -}}
{{- $ingress := get $value "ingressController.enabled" -}}
{{- $gateway := get $value "gatewayAPI.enabled" -}}
{{- if and (or $ingress $gateway (get $value "envoyConfig.enabled")) (eq (toString .Values.kubeProxyReplacement) "disabled") -}}
{{- fail "Ingress/Gateway API controller and EnvoyConfig require .Values.kubeProxyReplacement to be explicitly set to 'false' or 'true'" -}}
{{- end -}}
{{- if and (or $ingress $gateway (eq (toString (get $value "loadBalancer.l7.backend")) "envoy")) (not .Values.l7Proxy) -}}
{{- fail "Ingress or Gateway API controller or Envoy L7 Load Balancer  requires .Values.l7Proxy to be set to 'true'" -}}
{{- end -}}
{{- range $kind := list "ingress" "gateway" -}}
{{- $path := ternary "ingressController.service.externalTrafficPolicy" "gatewayAPI.externalTrafficPolicy" (eq $kind "ingress") -}}
{{- $policy := get $value $path -}}
{{- $wrong := not (or (kindIs "invalid" $policy) (has (toString $policy) (list "Cluster" "Local"))) -}}
{{- $type := get $value "ingressController.service.type" | default "LoadBalancer" -}}
{{- if and (eq $kind "ingress") $ingress $wrong (has $type (list "LoadBalancer" "NodePort")) -}}
{{- fail "Cilium Ingress services of type 'LoadBalancer' or 'NodePort' need an externalTrafficPolicy set to 'Cluster' or 'Local'." -}}
{{- end -}}
{{- if and (eq $kind "gateway") $gateway $wrong -}}
{{- fail "Cilium GatewayAPI needs an externalTrafficPolicy set to 'Cluster' or 'Local'." -}}
{{- end -}}
{{- end -}}
{{- if get $value "gke.enabled" -}}
{{- if ne (.Values.routingMode | default "native") "native" -}}
{{- fail "RoutingMode must be set to native when gke.enabled=true" -}}
{{- end -}}
{{- if and (get $value "keepDeprecatedLabels") (eq (include "cilium.namespace" .) "kube-system") -}}
{{- fail "Invalid configuration: Installing Cilium on GKE with 'kubernetes.io/cluster-service' labels on 'kube-system' namespace causes Cilium DaemonSet to be removed by GKE. Either install Cilium on a different Namespace or install with '--set keepDeprecatedLabels=false'" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.aksbyocni.enabled (ne (.Values.routingMode | default "tunnel") "tunnel") -}}
{{- fail "RoutingMode must be set to tunnel when aksbyocni.enabled=true" -}}
{{- end -}}
{{- $name := toString .Values.cluster.name -}}
{{- $id := int .Values.cluster.id -}}
{{- if not .Values.cluster.name -}}
{{- fail "The cluster name is invalid: cannot be empty" -}}
{{- else if gt (len $name) 32 -}}
{{- fail "The cluster name is invalid: must not be more than 32 characters" -}}
{{- else if not (regexMatch "^([a-z0-9][-a-z0-9]*)?[a-z0-9]$" $name) -}}
{{- fail "The cluster name is invalid: must consist of lower case alphanumeric characters and '-', and must start and end with an alphanumeric character" -}}
{{- else if and $id (eq $name "default") -}}
{{- fail "The cluster name is invalid: cannot use default value with cluster.id != 0" -}}
{{- end -}}
{{- $dropped := or (and (ge $id 128) (le $id 255)) (and (ge $id 384) (le $id 511)) -}}
{{- if and $dropped (or (get $value "eni.enabled") (get $value "alibabacloud.enabled") (eq (.Values.cni.chainingMode | default "none") "aws-cni")) -}}
{{- fail "Cilium is currently affected by a bug that causes traffic matched by network policies to be incorrectly dropped when running in either ENI mode (both AWS and AlibabaCloud) or AWS VPC CNI chaining mode, if the cluster ID is 128-255 (and 384-511 when maxConnectedClusters=511). Please refer to https://github.com/cilium/cilium/issues/21330 for additional details." -}}
{{- end -}}
{{- if and (eq (toString .Values.operator.setNodeTaints) "true") (not .Values.operator.removeNodeTaints) -}}
{{- fail "Cannot have operator.setNodeTaintsMaxNodes and not operator.removeNodeTaints = false" -}}
{{- end -}}
{{- if and (or .Values.ciliumEndpointSlice.enabled .Values.enableCiliumEndpointSlice) .Values.disableEndpointCRD -}}
{{- fail "if Cilium Endpoint Slice is enabled (.Values.ciliumEndpointSlice.enabled=true), it requires .Values.disableEndpointCRD=false" -}}
{{- end -}}
{{- $monitored := or .Values.prometheus.serviceMonitor.enabled .Values.operator.prometheus.serviceMonitor.enabled -}}
{{- if and $monitored (not .Values.prometheus.serviceMonitor.trustCRDsExist) (not (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) -}}
{{- fail "Service Monitor requires monitoring.coreos.com/v1 CRDs. Please refer to https://github.com/prometheus-operator/prometheus-operator/blob/main/example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml or set .Values.prometheus.serviceMonitor.trustCRDsExist=true" -}}
{{- end -}}
{{- end }}
