// Serves the folder from the browser's own copy. The export puts VERSION and FILES above this line.

const OURS = `vitruvian ${self.registration.scope} `; // other folders of this host have copies of their own
const COPY = OURS + VERSION;

self.addEventListener("install", (event) => {
  const fresh = (name) => new Request(name, { cache: "no-cache" });
  const copy = async () => (await caches.open(COPY)).addAll(FILES.map(fresh));
  event.waitUntil(copy().then(() => self.skipWaiting()));
});

self.addEventListener("activate", (event) => {
  const isOld = (name) => name.startsWith(OURS) && name !== COPY;
  const clean = async () => Promise.all((await caches.keys()).filter(isOld).map((name) => caches.delete(name)));
  event.waitUntil(clean().then(() => self.clients.claim()));
});

self.addEventListener("fetch", (event) => {
  if (event.request.method !== "GET" || !event.request.url.startsWith(self.registration.scope)) return;
  const answer = async () => (await (await caches.open(COPY)).match(event.request, { ignoreSearch: true })) ?? fetch(event.request);
  event.respondWith(answer());
});
