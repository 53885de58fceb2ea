# The HTTP service, without torch, compiler and model: a bundle is mounted, or made of a model that has an ONNX graph.
#
#   docker build -f docker/service.Dockerfile -t cloze-service .
#   docker build -f docker/service.Dockerfile -t cloze-service:gpu --build-arg RUNTIME=gpu .
#
# RUNTIME is cpu, gpu, or ray (cpu and Ray Serve). docker/requirements-RUNTIME.txt says what is installed, and pip checks its
# hashes. For gpu it includes CUDA and cuDNN as Python packages, and the NVIDIA container toolkit brings the driver, so all
# kinds stand on the same slim base.
FROM python:3.11-slim AS build
ARG RUNTIME=cpu
WORKDIR /app
# No source is here yet, so this installs what the package depends on and its name and version, which /info reports;
# the layer is made again when one of these two files changes, and not when the code does. The package's files have to
# exist, that of the default model too, which the image leaves out.
COPY pyproject.toml docker/requirements-$RUNTIME.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    touch README.md LICENSE && mkdir -p models/cloze-mini \
 && python -m venv --without-pip /opt/venv \
 && pip --python /opt/venv/bin/python install --require-hashes --no-deps -r requirements-$RUNTIME.txt \
 && pip --python /opt/venv/bin/python install --no-deps . \
 && pip --python /opt/venv/bin/python check
COPY LICENSE ./
COPY cloze cloze
# Compiled here, for the container cannot write, and readable for its user, whatever the modes on the machine that builds.
RUN rm -rf README.md pyproject.toml requirements-*.txt models cloze/training \
 && chmod -R a+rX . \
 && /opt/venv/bin/python -m compileall -q .

FROM python:3.11-slim
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app
WORKDIR /app
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    CLOZE_HOSTNAME=0.0.0.0 \
    CLOZE_PORT=8080
# A number and not a name, so that an orchestrator can see that it is not root.
USER 10001:10001
EXPOSE 8080
STOPSIGNAL SIGTERM
# http.client and not urllib: a proxy named in the environment must not be asked about 127.0.0.1.
HEALTHCHECK --interval=3s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['CLOZE_PORT']), timeout=2); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]
# The list form: the signal that stops the container reaches Python, not a shell.
ENTRYPOINT ["cloze", "serve"]
