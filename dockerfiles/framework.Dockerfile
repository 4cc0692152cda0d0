# One for all frameworks: they differ in their lock only. The wheelhouse comes as the build context and the network is
# off. The first stage is dropped, so that neither wheels nor pip are in the image.
ARG BASE
FROM ${BASE} AS builder
LABEL dpbench.stage="builder"
COPY . /wheelhouse
RUN python3 /wheelhouse/install.py

FROM ${BASE}
COPY --from=builder /opt/env /opt/env
ENTRYPOINT ["/opt/env/bin/python"]
# Of the runs it is given; a container started by hand is nobody either.
USER 65534:65534
