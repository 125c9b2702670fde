{{/* The pods of a workload. */}}

{{/* A pod's spec; {root, workload}. */}}
{{- define "tandem.podSpec" -}}
{{- $values := .root.Values -}}
{{- $w := .workload -}}
serviceAccountName: {{ include "tandem.serviceAccount" (dict "root" .root "component" $w.component) }}
automountServiceAccountToken: false
# Its variables would look like settings (TANDEM_...).
enableServiceLinks: false
terminationGracePeriodSeconds: {{ $w.terminationGracePeriodSeconds }}
securityContext: {{- toYaml $values.podSecurityContext | nindent 2 }}
{{- with $values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $w.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $w.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $w.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $w.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $w.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints: {{- include "tandem.topologySpread" $w | nindent 2 }}
containers:
  - name: {{ $w.component }}
    image: {{ include "tandem.image" . }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    command: [python, -m, {{ $w.module }}]
    args: {{- toYaml (concat (list "--config" "/etc/tandem/config.toml") $w.extraArgs) | nindent 6 }}
    env: {{- include "tandem.env" . | nindent 6 }}
    {{- with $w.extraEnvFrom }}
    envFrom: {{- toYaml . | nindent 6 }}
    {{- end }}
    ports:
      - {name: grpc, containerPort: {{ $w.port }}}
      - {name: health, containerPort: 7080}
      - {name: metrics, containerPort: 9090}
    {{- include "tandem.probes" $w | nindent 4 }}
    {{- if $w.preStopSeconds }}
    lifecycle:
      preStop:
        sleep: {seconds: {{ $w.preStopSeconds }}}
    {{- end }}
    resources: {{- include "tandem.resources" $w | nindent 6 }}
    securityContext: {{- toYaml $values.containerSecurityContext | nindent 6 }}
    volumeMounts: {{- include "tandem.volumeMounts" $w | nindent 6 }}
volumes: {{- include "tandem.volumes" $w | nindent 2 }}
{{- end -}}

{{/*
The probes of a workload. A pool's startup probe lasts until its model is loaded, so that liveness
begins then; a gateway's only until it runs, for it may wait for targets as long as they take.
*/}}
{{- define "tandem.probes" -}}
startupProbe:
  grpc: {port: 7080, service: {{ ternary "ready" "live" (ne .pool "") }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ divf .startupSeconds 5 | ceil | max 1 | int }}
livenessProbe:
  grpc: {port: 7080, service: live}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  grpc: {port: 7080, service: ready}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 2
{{- end -}}

{{/* Environment of a container; {root, workload}. */}}
{{- define "tandem.env" -}}
{{- $telemetry := .root.Values.telemetry -}}
# Below it libraries keep what they cache.
- name: HOME
  value: {{ ternary "/var/cache/tandem" "/tmp" (ne .workload.pool "") }}
{{- if and .workload.pool (ne .workload.model.source "hub") }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- if $telemetry.otlpEndpoint }}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ $telemetry.otlpEndpoint | quote }}
- name: OTEL_TRACES_SAMPLER
  value: {{ $telemetry.sampler | quote }}
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ $telemetry.samplerArg | quote }}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.pod.name=$(POD_NAME),k8s.namespace.name=$(POD_NAMESPACE),k8s.node.name=$(NODE_NAME)
{{- end }}
{{- with .workload.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Requests and limits with the GPUs in them. */}}
{{- define "tandem.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .pool -}}{{- if .gpu.count -}}
  {{- $limits := mergeOverwrite (dict) (get $resources "limits" | default dict) (dict .gpu.resource .gpu.count) -}}
  {{- $_ := set $resources "limits" $limits -}}
{{- end -}}{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Spread over nodes and zones where possible, if the values don't say. */}}
{{- define "tandem.topologySpread" -}}
{{- $constraints := .topologySpreadConstraints -}}
{{- if not $constraints -}}
  {{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" -}}
    {{- $constraints = append $constraints (dict "topologyKey" $key "maxSkew" 1
      "whenUnsatisfiable" "ScheduleAnyway" "matchLabelKeys" (list "pod-template-hash")) -}}
  {{- end -}}
{{- end -}}
{{- $whole := list -}}
{{- range $constraints -}}
  {{- $whole = append $whole (merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" $.selector))) -}}
{{- end -}}
{{- toYaml $whole -}}
{{- end -}}

{{- define "tandem.volumeMounts" -}}
- {name: config, mountPath: /etc/tandem/config.toml, subPath: config.toml, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .pool }}
- {name: cache, mountPath: /var/cache/tandem}
{{- if include "tandem.hasModel" . }}
{{- if eq .model.source "pvc" }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if include "tandem.hubToken" . }}
- {name: hub-token, mountPath: /etc/tandem/hub, readOnly: true}
{{- end }}
{{- end }}
{{- end }}
{{- with .extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tandem.volumes" -}}
- name: config
  configMap: {name: {{ .name }}}
- name: tmp
  emptyDir: {}
{{- if .pool }}
- name: cache
  {{- if .cache.claim }}
  persistentVolumeClaim: {claimName: {{ .cache.claim }}}
  {{- else if .cache.sizeLimit }}
  emptyDir: {sizeLimit: {{ .cache.sizeLimit }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- if include "tandem.hasModel" . }}
{{- if eq .model.source "pvc" }}
- name: models
  persistentVolumeClaim: {claimName: {{ .model.claim }}, readOnly: true}
{{- end }}
{{- if include "tandem.hubToken" . }}
- name: hub-token
  secret:
    secretName: {{ .model.hubTokenSecret.name }}
    defaultMode: 0440
    items: [{key: {{ .model.hubTokenSecret.key }}, path: {{ .model.hubTokenSecret.key }}}]
{{- end }}
{{- end }}
{{- end }}
{{- with .extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Whether a pool fetches its model with a token; empty if not. */}}
{{- define "tandem.hubToken" -}}
{{- if and (eq .model.source "hub") .model.hubTokenSecret.name -}}yes{{- end -}}
{{- end -}}
