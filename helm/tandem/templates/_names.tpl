{{/* Names and labels. */}}

{{/* The release's name, at most 32 characters long, so that a pool's name fits behind it. */}}
{{- define "tandem.fullname" -}}
{{- $name := .Values.fullnameOverride | default .Release.Name -}}
{{- if gt (len $name) 32 -}}
{{- printf "%s-%s" ($name | trunc 23 | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- else -}}
{{- $name -}}
{{- end -}}
{{- end -}}

{{/* Labels of every object; {root, component, pool}. */}}
{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* What selects the pods of one component or pool of this release; {root, component, pool}. */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .pool }}
tandem/pool: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Name of a component's ServiceAccount; {root, component}. */}}
{{- define "tandem.serviceAccount" -}}
{{- if .root.Values.serviceAccount.create -}}
{{- printf "%s-%s" (include "tandem.fullname" .root) .component -}}
{{- else -}}
{{- .root.Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}
