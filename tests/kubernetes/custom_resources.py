"""Strict models of the custom resources, for which `kubernetes-validate` has no schemas.

They have the fields that the manifests use, as KEDA 2 and its HTTP add-on, prometheus-operator, KubeRay 1.4 and Ray
Serve define them. The pods inside a RayService are checked with Kubernetes' schema.
"""

from typing import Annotated, Any, Literal

import kubernetes_validate
import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: str
    namespace: str | None = None
    labels: dict[str, str] = {}


class Selector(Strict):
    matchLabels: dict[str, str]


# KEDA


class Query(Strict):
    """A Prometheus trigger; KEDA accepts strings only."""

    serverAddress: str
    query: str
    threshold: str
    ignoreNullValues: Literal["true", "false"]


class PrometheusTrigger(Strict):
    name: str
    type: Literal["prometheus"]
    metadata: Query


class Interceptor(Strict):
    scalerAddress: str
    interceptorRoute: str


class InterceptorTrigger(Strict):
    name: str
    type: Literal["external-push"]
    metadata: Interceptor


class Target(Strict):
    name: str


class ScaledObjectSpec(Strict):
    scaleTargetRef: Target
    minReplicaCount: int
    maxReplicaCount: int
    pollingInterval: int
    cooldownPeriod: int = 300
    triggers: list[PrometheusTrigger | InterceptorTrigger]


class ScaledObject(Strict):
    apiVersion: Literal["keda.sh/v1alpha1"]
    kind: Literal["ScaledObject"]
    metadata: Metadata
    spec: ScaledObjectSpec


class RouteTarget(Strict):
    service: str
    portName: str


class RouteRule(Strict):
    hosts: list[str]


class Concurrency(Strict):
    targetValue: int


class ScalingMetric(Strict):
    concurrency: Concurrency


class Timeouts(Strict):
    readiness: str
    responseHeader: str
    request: str


class InterceptorRouteSpec(Strict):
    target: RouteTarget
    rules: list[RouteRule]
    scalingMetric: ScalingMetric
    timeouts: Timeouts


class InterceptorRoute(Strict):
    apiVersion: Literal["http.keda.sh/v1beta1"]
    kind: Literal["InterceptorRoute"]
    metadata: Metadata
    spec: InterceptorRouteSpec


# prometheus-operator


class Endpoint(Strict):
    port: str
    path: str
    interval: str


class ServiceMonitorSpec(Strict):
    jobLabel: str
    selector: Selector
    endpoints: list[Endpoint]


class ServiceMonitor(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["ServiceMonitor"]
    metadata: Metadata
    spec: ServiceMonitorSpec


class Record(Strict):
    record: str
    expr: str


class Alert(Strict):
    alert: str
    expr: str
    for_: str | None = Field(None, alias="for")
    labels: dict[str, str]
    annotations: dict[str, str]


class Group(Strict):
    name: str
    rules: list[Record | Alert]


class PrometheusRuleSpec(Strict):
    groups: list[Group]


class PrometheusRule(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PrometheusRule"]
    metadata: Metadata
    spec: PrometheusRuleSpec


# KubeRay and Ray Serve


class RuntimeEnvironment(Strict):
    env_vars: dict[str, str]


class Application(Strict):
    name: str
    import_path: str
    route_prefix: str
    args: dict[str, int]
    runtime_env: RuntimeEnvironment


class HTTPOptions(Strict):
    request_timeout_s: float


class ServeConfig(Strict):
    http_options: HTTPOptions
    applications: list[Application]


def _check_pod(template: dict[str, Any]) -> dict[str, Any]:
    pod = {"apiVersion": "v1", "kind": "Pod"} | template
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    return template


def _check_serve_config(text: str) -> str:
    ServeConfig.model_validate(yaml.safe_load(text))
    return text


PodTemplate = Annotated[dict[str, Any], AfterValidator(_check_pod)]


class HeadGroup(Strict):
    rayStartParams: dict[str, str]
    template: PodTemplate


class WorkerGroup(HeadGroup):
    groupName: str
    replicas: int
    minReplicas: int
    maxReplicas: int


class RayCluster(Strict):
    enableInTreeAutoscaling: bool
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]


class RayServiceSpec(Strict):
    serveConfigV2: Annotated[str, AfterValidator(_check_serve_config)]
    rayClusterConfig: RayCluster


class RayService(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Metadata
    spec: RayServiceSpec


CUSTOM: dict[str, type[Strict]] = {
    model.__name__: model for model in (ScaledObject, InterceptorRoute, ServiceMonitor, PrometheusRule, RayService)
}
