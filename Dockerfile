# docker build -t vitruvian . && docker run -p 8000:8000 vitruvian
FROM python:3.11-slim

RUN useradd --create-home vit && install -d -o vit /cache
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
# torch first and alone: its pin selects the build without CUDA
RUN pip install --no-cache-dir -c constraints.txt torch \
 && pip install --no-cache-dir -c constraints.txt '.[serve,train,hub]' \
 && rm -rf src

USER vit
ENV VITRUVIAN_CACHE=/cache
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=3s --start-period=120s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=2)"]
ENTRYPOINT ["vit", "serve", "--host", "0.0.0.0", "--port", "8000"]
