// The model in a thread of its own, so that the page stays responsive: preprocessing, and the graph in WebAssembly.

import * as ort from "./ort.wasm.bundle.min.js";
import { erase, preprocess } from "./preprocess.js";

const near = (name) => new URL(name, import.meta.url).href;
ort.env.wasm.numThreads = 1; // more would need headers that isolate the page
ort.env.wasm.wasmPaths = { wasm: near("ort-wasm-simd-threaded.wasm") };

async function open() {
  const [response, session] = await Promise.all([
    fetch(near("../model.json")), ort.InferenceSession.create(near("../model.onnx"), { executionProviders: ["wasm"] }),
  ]);
  return { facts: await response.json(), session };
}

const tasks = {
  facts: ({ facts }) => facts,
  prepare: ({ facts }, { image }) => preprocess(image, facts.preprocess),
  async logits({ facts, session }, { input: { pixels, rows, columns }, erased }) {
    const values = erased.length ? erase(pixels, [rows, columns], erased, facts.grid) : pixels;
    const tensor = new ort.Tensor("float32", values, [1, values.length / (rows * columns), rows, columns]);
    const outputs = await session.run({ [session.inputNames[0]]: tensor });
    return outputs[facts.output].data;
  },
};

let last = open(); // tasks run one after the other: a session computes one batch at a time
self.onmessage = ({ data: { id, task, ...values } }) => {
  const model = last;
  last = model.then(async (opened) => {
    try {
      self.postMessage({ id, result: await tasks[task](opened, values) });
    } catch (error) {
      self.postMessage({ id, error: String(error?.message ?? error) });
    }
    return opened;
  });
  model.catch((error) => self.postMessage({ id, error: String(error?.message ?? error) }));
};
