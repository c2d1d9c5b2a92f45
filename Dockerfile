# A server of one model on NVIDIA GPUs (docs/serving.md). Not built by the tests; its commands are the README's.
#
#   docker build -t fastgen-jax .
#   docker run --gpus all -p 8000:8000 -v fastgen-cache:/home/fastgen/.cache fastgen-jax llama2-7b --api-key "$KEY"
#
# The volume keeps downloaded weights and compiled programs. The driver has to be recent enough for CUDA 12.8.

FROM nvidia/cuda:12.8.1-base-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home fastgen
USER fastgen
WORKDIR /home/fastgen

COPY --chown=fastgen . src
RUN python3 -m venv venv && venv/bin/pip install --no-cache-dir "./src[cuda12,serve]" && rm -rf src
ENV PATH=/home/fastgen/venv/bin:$PATH

EXPOSE 8000 50050
# Ready after the weights are loaded and every program is compiled, which can take minutes the first time.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m \
    CMD python3 -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"

# SIGTERM, which `docker stop` sends, finishes what runs; --stop-timeout says how long that may take.
ENTRYPOINT ["fastgen", "serve", "--host", "0.0.0.0"]
CMD ["smollm2-135m"]
