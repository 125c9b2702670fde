{{/* The services' settings, as the TOML file that each of them is given. */}}

{{/* A service's config.toml; {root, workloads, workload}. */}}
{{- define "tandem.config" -}}
{{- $w := .workload -}}
{{- $settings := dict
  "host" "0.0.0.0" "port" $w.port "health_port" 7080 "metrics_port" 9090
  "pool" ($w.pool | default $w.component)
  "drain_seconds" $w.drainSeconds
  "log_level" .root.Values.logging.level "log_format" .root.Values.logging.format -}}
{{- if $w.pool -}}
  {{- $settings = merge $settings (include "tandem.poolSettings" $w | fromJson) -}}
{{- else -}}
  {{- $settings = merge $settings (include "tandem.peers" . | fromJson) -}}
{{- end -}}
{{- $elsewhere := include "tandem.ownedSettings" . | fromYaml -}}
{{- range $key, $value := $w.settings -}}
  {{- if hasKey $elsewhere $key -}}
    {{- fail (printf "\n\n%s.settings.%s belongs to the chart: %s.\n" $w.where $key (get $elsewhere $key)) -}}
  {{- end -}}
  {{- if not (regexMatch "^[a-z][a-z0-9_]*$" $key) -}}
    {{- fail (printf "\n\n%s.settings: %q is no TOML name of a setting; write it with underscores, as max_rows.\n" $w.where $key) -}}
  {{- end -}}
  {{- if or (kindIs "map" $value) (kindIs "invalid" $value) -}}
    {{- fail (printf "\n\n%s.settings.%s is %s, must be a text, number, boolean or list.\n" $w.where $key (ternary "empty" "a map" (kindIs "invalid" $value))) -}}
  {{- end -}}
  {{- $_ := set $settings $key $value -}}
{{- end -}}
{{- range $w.extraEnv -}}
  {{- $key := trimPrefix "TANDEM_" .name | lower -}}
  {{- if and (hasPrefix "TANDEM_" .name) (has $key (list "host" "port" "health_port" "metrics_port")) -}}
    {{- fail (printf "\n\n%s.extraEnv: %s belongs to the chart: %s.\n" $w.where .name (get $elsewhere $key)) -}}
  {{- end -}}
{{- end -}}
{{- range $key, $value := $settings }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{ end -}}

{{/* What a pool's values say of its service, as JSON; takes the workload. */}}
{{- define "tandem.poolSettings" -}}
{{- $settings := dict "cache_dir" "/var/cache/tandem" -}}
{{- if eq .component "draft" -}}{{- $_ := set $settings "drafter" .drafter -}}{{- end -}}
{{- $threads := include "tandem.threads" . -}}
{{- if $threads -}}{{- $_ := set $settings "threads" (int $threads) -}}{{- end -}}
{{- if include "tandem.hasModel" . -}}
  {{- $_ := set $settings "device" (.device | default (ternary "cuda" "cpu" (gt (int .gpu.count) 0))) -}}
  {{- $_ := set $settings "dtype" .dtype -}}
  {{- with .model.modelName -}}{{- $_ := set $settings "model_name" . -}}{{- end -}}
  {{- if eq .model.source "hub" -}}
    {{- $_ := set $settings "model" .model.id -}}
    {{- if .model.hubTokenSecret.name -}}
      {{- $_ := set $settings "hub_token_file" (printf "/etc/tandem/hub/%s" .model.hubTokenSecret.key) -}}
    {{- end -}}
  {{- else if eq .model.source "pvc" -}}
    {{- $_ := set $settings "model" (printf "/models/%s" (trimPrefix "/" .model.path) | trimSuffix "/") -}}
  {{- end -}}
{{- end -}}
{{- toJson $settings -}}
{{- end -}}

{{/* Where the gateway finds its peers, as JSON; {root, workloads, workload}. */}}
{{- define "tandem.peers" -}}
{{- $peers := dict "target" (list) "draft" (list) -}}
{{- /* Whole names, with the dot: no search, and a name that is gone is told from a failed lookup. */ -}}
{{- $domain := printf "%s.svc.%s." .root.Release.Namespace .root.Values.clusterDomain -}}
{{- range .workloads -}}
  {{- if .pool -}}
    {{- $entry := printf "dns:%s.%s:%d" .name $domain (int .port) -}}
    {{- $_ := set $peers .component (append (get $peers .component) $entry) -}}
  {{- end -}}
{{- end -}}
{{- $settings := dict "target" (concat $peers.target .workload.extraTargets) -}}
{{- with concat $peers.draft .workload.extraDrafts -}}
  {{- $_ := set $settings "draft" . -}}
{{- end -}}
{{- toJson $settings -}}
{{- end -}}

{{/*
Threads for a pool's container: of its CPU limit, else its request, rounded up.
A process sees all cores of its node, whatever it may use of them.
*/}}
{{- define "tandem.threads" -}}
{{- $cpu := dig "limits" "cpu" (dig "requests" "cpu" "" .resources) .resources | toString -}}
{{- if and $cpu (not (regexMatch "^[0-9]+(\\.[0-9]+)?m?$" $cpu)) -}}
  {{- fail (printf "\n\n%s.resources: cpu is %q, must be a number of cores, such as 2 or 500m.\n" .where $cpu) -}}
{{- end -}}
{{- if hasSuffix "m" $cpu -}}
  {{- ceil (divf (float64 (trimSuffix "m" $cpu)) 1000) | int -}}
{{- else if $cpu -}}
  {{- ceil (float64 $cpu) | int -}}
{{- end -}}
{{- end -}}

{{/* Settings that `settings` may not have, and what to use instead. */}}
{{- define "tandem.ownedSettings" -}}
host: pods listen on all addresses
port: probes and Services rely on it; clients' port is gateway.service.port
health_port: probes rely on it
metrics_port: the PodMonitor relies on it
pool: it is the pool's name
drain_seconds: use drainSeconds
log_level: use logging.level
log_format: use logging.format
cache_dir: the cache volume is there; use cache
drafter: use drafter
device: use device
dtype: use dtype
model: use model
model_name: use model.modelName
hub_token_file: use model.hubTokenSecret
target: use targets.pools and gateway.extraTargets
draft: use drafts.pools and gateway.extraDrafts
{{- end -}}
