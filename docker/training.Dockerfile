# Training, evaluation and export.
#
#   docker compose run --rm training cloze fit RECIPE ...
#
# torch comes from the package index: on Linux, the build with CUDA. To use another build, name an image that contains only
# its wheel (FROM scratch, COPY *.whl /):
#
#   docker build -f docker/training.Dockerfile -t cloze-training --build-arg WHEELS=my-wheels .
ARG WHEELS=scratch
FROM ${WHEELS} AS wheels

FROM python:3.11-slim AS build
WORKDIR /src
# Install the dependencies before the code is copied, as in service.Dockerfile.
COPY pyproject.toml constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=wheels,target=/wheels \
    touch README.md LICENSE && mkdir -p models/cloze-mini \
 && python -m venv --without-pip /opt/venv \
 && pip --python /opt/venv/bin/python install -c constraints.txt --find-links /wheels ".[report]"
COPY LICENSE /app/
COPY cloze /app/cloze
RUN rm -rf /app/cloze/service && chmod -R a+rX /app

FROM python:3.11-slim
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app
# Runs, data and bundles are mounted in the working directory. The code is elsewhere, so that no mount hides it.
WORKDIR /workspace
# HOME and USER: the user may be any number (RUN_AS), and torch needs the user's name.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    USER=cloze \
    HF_HOME=/workspace/runs/.hub
USER 1000:1000
STOPSIGNAL SIGINT
CMD ["cloze", "fit"]
