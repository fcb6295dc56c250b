{{/* What objects are called. */}}
{{- define "aenv.fullname" -}}
{{- default .Release.Name .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "aenv.selector" -}}
app.kubernetes.io/name: aenvironment
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "aenv.labels" -}}
{{ include "aenv.selector" . }}
app.kubernetes.io/part-of: aenvironment
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
aenv/release-namespace: {{ .Release.Namespace }}
{{- end -}}

{{- define "aenv.sandboxNamespace" -}}
{{- default (printf "%s-sandboxes" .Release.Namespace) .Values.sandboxes.namespace -}}
{{- end -}}

{{- define "aenv.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest | quote -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) | quote -}}
{{- end -}}
{{- end -}}

{{/* The engine of hub and API. */}}
{{- define "aenv.engine" -}}
{{- if .Values.controller.enabled -}}
http=http://{{ include "aenv.fullname" . }}-controller.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:8080
{{- else -}}
kubernetes
{{- end -}}
{{- end -}}

{{/* Every name that a Service has in the cluster, by comma: {"root": ., "name": "..."}. */}}
{{- define "aenv.hostNames" -}}
{{- $namespace := .root.Release.Namespace -}}
{{- .name }},{{ .name }}.{{ $namespace }},{{ .name }}.{{ $namespace }}.svc,{{ .name }}.{{ $namespace }}.svc.{{ .root.Values.clusterDomain }}
{{- end -}}

{{/*
The rights over sandboxes, in their namespace and nowhere else. Everything that the engine asks of the cluster is here,
and nothing more. No Secrets: what is secret is brought to a sandbox by the platform itself. No exec: so are commands.
Network policies are applied, which makes and changes them, and neither read nor deleted. The lease says which of several
servers clears up.
*/}}
{{- define "aenv.sandboxRules" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [create, get, list, watch, patch, delete]
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [create, get, list, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, patch]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create, get, update]
{{- end -}}

{{/* Quantities are text to a cluster, whatever they are in values. */}}
{{- define "aenv.resources" -}}
{{- range $kind, $row := . }}
{{ $kind }}:
  {{- range $name, $quantity := $row }}
  {{ $name }}: {{ $quantity | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "aenv.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .user }}
runAsGroup: {{ .user }}
fsGroup: {{ .user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "aenv.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* Where a pod may be: {"root": ., "part": .Values.hub}. */}}
{{- define "aenv.placement" -}}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- $root := .root }}
{{- if or $root.Values.hostAliases $root.Values.clusterIPs }}
hostAliases:
  {{- range $part, $address := $root.Values.clusterIPs }}
  - ip: {{ $address | quote }}
    hostnames:
      - {{ include "aenv.fullname" $root }}-{{ $part }}.{{ $root.Release.Namespace }}.svc.{{ $root.Values.clusterDomain }}
  {{- end }}
  {{- with $root.Values.hostAliases }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .part.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* What is written on a pod: {"root": ., "component": "hub"}. */}}
{{- define "aenv.podMetadata" -}}
labels:
  {{- include "aenv.labels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  {{- with .root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  aenv/pod-templates: {{ toJson .root.Values.podTemplates | sha256sum | trunc 16 | quote }}
  {{- with .root.Values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/*
Variables of every server: {"root": ., "component": "hub", "part": .Values.hub, "names": "..."}. Controllers have
records and an admin of their own: whoever has a token for the one may do nothing with the other.
*/}}
{{- define "aenv.env" -}}
{{- $root := .root -}}
{{- $full := include "aenv.fullname" $root -}}
{{- $controller := eq .component "controller" -}}
- name: AENV_LOG_FORMAT
  value: {{ $root.Values.logFormat }}
- name: AENV_ALLOWED_HOSTS
  value: {{ join "," $root.Values.allowedHosts | printf "%s,%s" .names | trimSuffix "," | quote }}
- name: AENV_NAMESPACE
  value: {{ include "aenv.sandboxNamespace" $root }}
- name: AENV_BASE_IMAGE
  value: {{ $root.Values.sandboxes.baseImage | quote }}
- name: AENV_LONGEST_LIFE
  value: {{ int $root.Values.sandboxes.longestLife | quote }}
{{- with $root.Values.sandboxes.extendedResources }}
- name: AENV_EXTENDED_RESOURCES
  value: {{ join "," . | quote }}
{{- end }}
{{- if $root.Values.podTemplates }}
- name: AENV_POD_TEMPLATES
  value: /etc/aenv/pod-templates
{{- end }}
{{- with $root.Values.traces }}
- name: AENV_TRACES
  value: {{ . | quote }}
{{- end }}
{{- if $root.Values.controller.enabled }}
- name: {{ ternary "AENV_FIRST_TOKEN" "AENV_CONTROLLER_KEY" $controller }}
  valueFrom:
    secretKeyRef:
      name: {{ default (printf "%s-controller" $full) $root.Values.controller.existingSecret }}
      key: token
{{- end }}
{{- if not $controller }}
- name: AENV_FIRST_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ default (printf "%s-first-token" $full) $root.Values.firstToken.existingSecret }}
      key: token
# What was asked of one API server is gone on with by another, which has nobody's token for the hub. The hub lets it read.
- name: AENV_HUB_KEY
  valueFrom:
    secretKeyRef:
      name: {{ default (printf "%s-hub-key" $full) $root.Values.hubKey.existingSecret }}
      key: token
{{- end }}
{{- if $root.Values.serviceMonitor.enabled }}
# Controllers have other records than hub and API, and a ServiceMonitor has one token for all of them.
- name: AENV_METRICS_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ default (printf "%s-metrics" $full) $root.Values.serviceMonitor.tokenSecret }}
      key: token
{{- end }}
{{- if $root.Values.redis.enabled }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ default (printf "%s-redis" $full) $root.Values.redis.auth.existingSecret }}
      key: password
- name: AENV_STORE
  value: redis://:$(REDIS_PASSWORD)@{{ $full }}-redis.{{ $root.Release.Namespace }}.svc.{{ $root.Values.clusterDomain }}:6379/{{ ternary 1 0 $controller }}
{{- else }}
- name: AENV_STORE
  valueFrom:
    secretKeyRef:
      name: {{ default (printf "%s-redis" $full) $root.Values.redis.external.existingSecret }}
      key: {{ ternary "controller-url" "url" $controller }}
{{- end }}
{{- with $root.Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- with .part.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
A Secret with a token that is made once: {"root": ., "name": "...", "keep": true}. One that is kept outlives the release,
as what is in the store does, which was made with it.
*/}}
{{- define "aenv.tokenSecret" -}}
{{- $kept := lookup "v1" "Secret" .root.Release.Namespace .name -}}
apiVersion: v1
kind: Secret
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "aenv.labels" .root | nindent 4 }}
  {{- if .keep }}
  annotations:
    helm.sh/resource-policy: keep
  {{- end }}
type: Opaque
data:
  {{- if $kept }}
  token: {{ $kept.data.token }}
  {{- else }}
  token: {{ printf "aenv_%s" (randAlphaNum 43) | b64enc }}
  {{- end }}
{{- end -}}

{{/* Liveness must not end a server that is about to stop by itself, and says 503 meanwhile: {"seconds": 40}. */}}
{{- define "aenv.probes" -}}
startupProbe:
  httpGet: {path: /health, port: control}
  periodSeconds: 2
  failureThreshold: 60
readinessProbe:
  httpGet: {path: /health, port: control}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /health, port: control}
  periodSeconds: {{ add .seconds 10 }}
  timeoutSeconds: 10
  failureThreshold: 3
{{- end -}}

{{/* What a server may write to. */}}
{{- define "aenv.mounts" -}}
- {name: home, mountPath: /var/lib/aenv}
- {name: tmp, mountPath: /tmp}
{{- if .Values.podTemplates }}
- {name: pod-templates, mountPath: /etc/aenv/pod-templates, readOnly: true}
{{- end }}
{{- end -}}

{{- define "aenv.volumes" -}}
- {name: home, emptyDir: {}}
- {name: tmp, emptyDir: {}}
{{- if .Values.podTemplates }}
- name: pod-templates
  configMap: {name: {{ include "aenv.fullname" . }}-pod-templates}
{{- end }}
{{- end -}}
