# The HTTP service, without torch, a compiler or a model. Mount a bundle, or name a model that has an ONNX graph.
#
#   docker build -f docker/service.Dockerfile -t cloze-service .
#   docker build -f docker/service.Dockerfile -t cloze-service:gpu --build-arg RUNTIME=gpu .
#
# RUNTIME is cpu, gpu, or ray (cpu and Ray Serve). pip installs docker/requirements-RUNTIME.txt and checks its hashes. All
# three use the same slim base image: for gpu, CUDA and cuDNN are Python packages, and the NVIDIA container toolkit provides
# the driver.
FROM python:3.11-slim AS build
ARG RUNTIME=cpu
WORKDIR /app
# Install the dependencies before the code is copied, so that this layer is rebuilt only if one of these two files changes.
# This also records the package's version, which /info reports. The empty files and the model's empty folder, which
# the image omits, must exist for the package to install.
COPY pyproject.toml docker/requirements-$RUNTIME.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    touch README.md LICENSE && mkdir -p models/cloze-mini \
 && python -m venv --without-pip /opt/venv \
 && pip --python /opt/venv/bin/python install --require-hashes --no-deps -r requirements-$RUNTIME.txt \
 && pip --python /opt/venv/bin/python install --no-deps . \
 && pip --python /opt/venv/bin/python check
COPY LICENSE ./
COPY cloze cloze
# Compile now, because the container's file system is read-only. Make the code readable for any modes on the build machine.
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
# A number instead of a name, so that an orchestrator can verify that the user is not root.
USER 10001:10001
EXPOSE 8080
STOPSIGNAL SIGTERM
# http.client instead of urllib, which would send the request to a proxy that the environment names.
HEALTHCHECK --interval=3s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['CLOZE_PORT']), timeout=2); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]
# The list form, so that the stop signal reaches Python instead of a shell.
ENTRYPOINT ["cloze", "serve"]
