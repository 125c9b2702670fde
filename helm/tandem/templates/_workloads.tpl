{{/* What this release runs: the gateways, and each pool of targets and drafts. */}}

{{/*
A JSON object of name -> workload. A workload is its values (a pool's over poolDefaults) and
component, pool, where (its place in the values), name, module, port, labels and selector.
*/}}
{{- define "tandem.workloads" -}}
{{- $root := . -}}
{{- $fullname := include "tandem.fullname" . -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" $fullname) -}}
  {{- fail (printf "\n\nthe release is called %q, which names no Service: set fullnameOverride to lower-case letters, digits and hyphens, a letter first.\n" $fullname) -}}
{{- end -}}
{{- $found := dict -}}
{{- $gateway := deepCopy .Values.gateway | merge (dict
  "component" "gateway" "pool" "" "where" "gateway" "module" "gateway" "port" 7070) -}}
{{- $_ := set $found "gateway" $gateway -}}
{{- $pools := dict
  "target" (dict "tier" "targets" "module" "target_service" "port" 7071 "pools" .Values.targets.pools)
  "draft" (dict "tier" "drafts" "module" "draft_service" "port" 7072 "pools" .Values.drafts.pools) -}}
{{- range $component, $about := $pools -}}
  {{- range $pool, $own := $about.pools -}}
    {{- if not (kindIs "invalid" $own) -}}
      {{- include "tandem.checkOwn" (dict "tier" $about.tier "pool" $pool "own" $own) -}}
      {{- $workload := mergeOverwrite (deepCopy $root.Values.poolDefaults) $own (dict
        "component" $component "pool" $pool "where" (printf "%s.pools.%s" $about.tier $pool)
        "module" $about.module "port" $about.port) -}}
      {{- $_ := set $found (printf "%s-%s" $component $pool) $workload -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- range $suffix, $workload := $found -}}
  {{- $about := dict "root" $root "component" $workload.component "pool" $workload.pool -}}
  {{- $_ := set $workload "name" (printf "%s-%s" $fullname $suffix) -}}
  {{- $_ := set $workload "labels" (include "tandem.labels" $about | fromYaml) -}}
  {{- $_ := set $workload "selector" (include "tandem.selector" $about | fromYaml) -}}
  {{- include "tandem.check" $workload -}}
{{- end -}}
{{- include "tandem.checkAll" $found -}}
{{- toJson $found -}}
{{- end -}}

{{/* Fails, saying what to change, if the workloads make no Tandem. */}}
{{- define "tandem.checkAll" -}}
{{- $targets := list -}}
{{- range $name, $workload := . -}}
  {{- if eq $workload.component "target" -}}{{- $targets = append $targets $name -}}{{- end -}}
{{- end -}}
{{- if not (or $targets .gateway.extraTargets) -}}
  {{- fail "\n\ntargets.pools is empty: nothing would decide tokens. Name a pool, such as --set targets.pools.main.model.source=packaged, or start from one of ci/*-values.yaml.\n" -}}
{{- end -}}
{{- end -}}

{{/* Fails, saying what to change, if a pool's name or own values can't be; {tier, pool, own}. */}}
{{- define "tandem.checkOwn" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,18}[a-z0-9])?$" .pool) -}}
  {{- fail (printf "\n\n%s.pools.%s: a pool's name is a part of DNS names. Use 1 to 20 lower-case letters, digits and hyphens, a letter first.\n" .tier .pool) -}}
{{- end -}}
{{- if and (eq .tier "targets") (hasKey .own "drafter") -}}
  {{- fail (printf "\n\ntargets.pools.%s.drafter: only drafts have one. Remove it, or move the pool to drafts.pools.\n" .pool) -}}
{{- end -}}
{{- end -}}

{{/* Fails, saying what to change, if a workload can't run as its values have it. */}}
{{- define "tandem.check" -}}
{{- $w := . -}}
{{- $needed := add (int $w.preStopSeconds) (int $w.drainSeconds) 5 -}}
{{- if le (int $w.terminationGracePeriodSeconds) (int $needed) -}}
  {{- fail (printf "\n\n%s.terminationGracePeriodSeconds is %d, must be above %d: preStopSeconds (%d) + drainSeconds (%d) + 5 s to flush spans and close. Raise it, or lower one of the others; Kubernetes would kill requests that still may finish.\n" $w.where (int $w.terminationGracePeriodSeconds) (int $needed) (int $w.preStopSeconds) (int $w.drainSeconds)) -}}
{{- end -}}
{{- if and $w.autoscaling.hpa.enabled $w.autoscaling.keda.enabled -}}
  {{- fail (printf "\n\n%s.autoscaling has both hpa and keda enabled: they would undo each other's scaling. Enable one of them.\n" $w.where) -}}
{{- end -}}
{{- if and $w.autoscaling.keda.enabled (not $w.autoscaling.keda.serverAddress) -}}
  {{- fail (printf "\n\n%s.autoscaling.keda.serverAddress is empty: KEDA asks Prometheus; name it, such as http://prometheus.monitoring:9090.\n" $w.where) -}}
{{- end -}}
{{- if lt (int $w.autoscaling.maxReplicas) (int $w.autoscaling.minReplicas) -}}
  {{- fail (printf "\n\n%s.autoscaling.maxReplicas is %d, must be minReplicas (%d) or more.\n" $w.where (int $w.autoscaling.maxReplicas) (int $w.autoscaling.minReplicas)) -}}
{{- end -}}
{{- if and (has (toString $w.strategy.maxSurge) (list "0" "0%")) (has (toString $w.strategy.maxUnavailable) (list "0" "0%")) -}}
  {{- fail (printf "\n\n%s.strategy has maxSurge and maxUnavailable both 0: no pod could ever be replaced. Raise one of them.\n" $w.where) -}}
{{- end -}}
{{- if $w.pool -}}{{- include "tandem.checkPool" $w -}}{{- end -}}
{{- end -}}

{{/* Fails, saying what to change, if a pool's model and GPU don't fit together. */}}
{{- define "tandem.checkPool" -}}
{{- $w := . -}}
{{- $cuda := hasPrefix "cuda" $w.device -}}
{{- $ngram := and (eq $w.component "draft") (eq $w.drafter "ngram") -}}
{{- if and (or $w.gpu.count $cuda) (not $w.gpu.resource) -}}
  {{- fail (printf "\n\n%s.gpu.resource is empty, but the pool wants a GPU (gpu.count %d, device %q): say what the device plugin calls it, such as nvidia.com/gpu.\n" $w.where (int $w.gpu.count) $w.device) -}}
{{- end -}}
{{- if and $cuda (not $w.gpu.count) -}}
  {{- fail (printf "\n\n%s.device is %s, but gpu.count is 0: raise gpu.count, or leave device empty.\n" $w.where $w.device) -}}
{{- end -}}
{{- if and $w.gpu.count (eq $w.device "cpu") -}}
  {{- fail (printf "\n\n%s.device is cpu, but gpu.count is %d: the GPU would be idle. Set gpu.count to 0, or leave device empty.\n" $w.where (int $w.gpu.count)) -}}
{{- end -}}
{{- if and $ngram (or $w.gpu.count (ne $w.model.source "packaged")) -}}
  {{- fail (printf "\n\n%s.drafter is ngram, which uses neither model nor GPU (model.source is %s, gpu.count %d): set drafter to model, or leave those out.\n" $w.where $w.model.source (int $w.gpu.count)) -}}
{{- end -}}
{{- if and (eq $w.model.source "hub") (not $w.model.id) -}}
  {{- fail (printf "\n\n%s.model.id is empty, but model.source is hub: name the model as the hub does, OWNER/NAME.\n" $w.where) -}}
{{- end -}}
{{- if and (eq $w.model.source "pvc") (not $w.model.claim) -}}
  {{- fail (printf "\n\n%s.model.claim is empty, but model.source is pvc: name the PersistentVolumeClaim that holds the model.\n" $w.where) -}}
{{- end -}}
{{- end -}}

{{/* Image of a workload; {root, workload}. */}}
{{- define "tandem.image" -}}
{{- $image := .root.Values.image -}}
{{- if .workload.image -}}
{{- .workload.image -}}
{{- else -}}
{{- $named := printf "tandem-%s:%s" .workload.component (toString ($image.tag | default .root.Chart.AppVersion)) -}}
{{- if $image.registry -}}{{- printf "%s/%s" (trimSuffix "/" $image.registry) $named -}}{{- else -}}{{- $named -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether a workload loads a model; empty if not. */}}
{{- define "tandem.hasModel" -}}
{{- if or (eq .component "target") (and (eq .component "draft") (eq .drafter "model")) -}}yes{{- end -}}
{{- end -}}

{{/* Seconds that the slowest pool may take to load: a gateway waits for it. */}}
{{- define "tandem.longestStart" -}}
{{- $longest := 0 -}}
{{- range . -}}{{- $longest = max $longest (int .startupSeconds) -}}{{- end -}}
{{- $longest -}}
{{- end -}}

{{/* The workload's scaling metrics as a JSON object of name -> average value a pod. */}}
{{- define "tandem.scalingMetrics" -}}
{{- $own := dict
  "gateway" (dict "tandem_num_live_requests" 128)
  "target" (dict "tandem_num_requests_running" 32 "tandem_num_requests_waiting" 4)
  "draft" (dict "tandem_draft_num_sequences" 32) -}}
{{- .autoscaling.metrics | default (get $own .component) | toJson -}}
{{- end -}}
