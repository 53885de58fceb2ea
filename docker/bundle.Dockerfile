# The service's image with a bundle in it, for Kubernetes: docs/scale.md.
#
#   docker build -f docker/bundle.Dockerfile -t registry.example/cloze:cloze-mini-1 models
#
# The last argument is the folder that contains the bundle's folder, BUNDLE. SERVICE is an image of service.Dockerfile.
ARG SERVICE=cloze-service
FROM $SERVICE
ARG BUNDLE=cloze-mini
# Readable for the service's user, for any modes on the build machine.
COPY --chmod=755 $BUNDLE /models/$BUNDLE
