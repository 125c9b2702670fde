// llama.cpp, as npm's node-llama-cpp ships it, in a process of its own; see protocol.py.
// node llama_worker.mjs FOLDER_OF_node-llama-cpp MODEL.gguf CONTEXT MAX_RUNNING THREADS
import {createInterface} from "node:readline";
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

const [folder, modelPath, contextSize, maxRunning, threads] = process.argv.slice(2);
const where = createRequire(`${folder}/package.json`).resolve("node-llama-cpp");
const {getLlama} = await import(pathToFileURL(where).href);

const llama = await getLlama({
    gpu: false,
    build: "never",
    logLevel: "error",
    maxThreads: Number(threads)
});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({
    contextSize: Number(contextSize),
    sequences: Number(maxRunning),
    threads: {ideal: Number(threads), min: Number(threads)}
});

async function answer(ids, numTokens, began) {
    const sequence = context.getSequence();
    const tokens = [];
    let first = null;
    for await (const token of sequence.evaluate(ids, {temperature: 0, yieldEogToken: true})) {
        first ??= (performance.now() - began) / 1e3;
        tokens.push(token);
        if (tokens.length === numTokens)
            break;
    }
    await sequence.dispose(); // what it knows of the prompt goes with it
    return {first, tokens};
}

console.log("ready");
for await (const line of createInterface({input: process.stdin})) {
    const {prompts, num_tokens: numTokens} = JSON.parse(line);
    const began = performance.now();
    const answers = await Promise.all(prompts.map((ids) => answer(ids, numTokens, began)));
    console.log(JSON.stringify({
        seconds: (performance.now() - began) / 1e3,
        first_seconds: answers.map((a) => a.first),
        token_ids: answers.map((a) => a.tokens)
    }));
}
process.exit(0);
