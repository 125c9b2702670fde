{{/* What a workload's pods may reach; {root, workloads, workload}. */}}
{{- define "tandem.egress" -}}
{{- $policy := .root.Values.networkPolicy -}}
# DNS, wherever it is.
- ports: [{protocol: UDP, port: 53}, {protocol: TCP, port: 53}]
{{- if not .workload.pool }}
{{- range .workloads }}
{{- if .pool }}
- to:
    - podSelector:
        matchLabels: {{- toYaml .selector | nindent 10 }}
  ports: [{protocol: TCP, port: {{ .port }}}]
{{- end }}
{{- end }}
{{- else if and (include "tandem.hasModel" .workload) (eq .workload.model.source "hub") }}
# The hub.
- ports: [{protocol: TCP, port: 443}]
{{- end }}
{{- with include "tandem.telemetryPort" .root }}
# Traces.
- ports: [{protocol: TCP, port: {{ . }}}]
  {{- with $policy.telemetryNamespace }}
  to:
    - namespaceSelector:
        matchLabels: {kubernetes.io/metadata.name: {{ . }}}
  {{- end }}
{{- end }}
{{- with $policy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Port of the OTLP endpoint; empty without one. */}}
{{- define "tandem.telemetryPort" -}}
{{- regexFind ":[0-9]+/?$" .Values.telemetry.otlpEndpoint | trimPrefix ":" | trimSuffix "/" -}}
{{- end -}}
