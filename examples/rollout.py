"""Rollouts for reinforcement learning: a tiny model answers problems, a rule rewards it, unfinished groups go back.

python examples/rollout.py FOLDER [--num-rollout 8] and any flag of lmms_stream.rl.add_data_arguments. What is not there
yet is made: FOLDER/prompts.jsonl (problems as in GSM8K) and FOLDER/model (random weights, a tokenizer). Each rollout
appends its finished groups to FOLDER/groups.jsonl. Killed and started again, it goes on with the same groups.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lmms_stream.rl import RolloutDataSourceWithBuffer, RolloutManager, Sample, add_data_arguments
from lmms_stream.tools.demo.corpus import train_tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

TOKENS_AT_ONCE, MAX_TOKENS = 6, 18  # of a response: before it goes back, and in all


def write_prompts(path: Path, *, num_prompts: int = 60) -> list[str]:
    """Word problems and their answers, as in GSM8K."""
    rng = np.random.default_rng(7)
    rows = []
    for number in range(num_prompts):
        a, b, c = rng.integers(2, 20, 3).tolist()
        name, thing = rng.choice(["Ada", "Ben", "Chen", "Dina"]), rng.choice(["apples", "books", "coins"])
        question = f"{name} has {a} bags of {b} {thing} and gives {c} away. How many {thing} are left?"
        rows.append({"question": question, "answer": f"{a * b - c}", "metadata": {"number": number}})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [row["question"] + " " + row["answer"] for row in rows]


def make_model(folder: Path, texts: list[str]) -> None:
    train_tokenizer(texts, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)


@torch.no_grad()
def generate(model: Any, tokenizer: Any, sample: Sample) -> None:
    """Go on with a response. The dice depend on the sample and its tokens alone, so a run can be repeated."""
    if not sample.tokens:
        sample.tokens = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    start = len(sample.tokens) - sample.response_length
    assert sample.index is not None
    dice = torch.Generator().manual_seed(sample.index << 16 | sample.response_length)
    sample.status = Sample.Status.ABORTED
    for _ in range(TOKENS_AT_ONCE):
        probabilities = model(torch.tensor([sample.tokens])).logits[0, -1].softmax(-1)
        token = int(torch.multinomial(probabilities, 1, generator=dice))
        sample.tokens.append(token)
        sample.response_length += 1
        sample.response = tokenizer.decode(sample.tokens[start:])
        if token == tokenizer.eos_token_id or re.search(r"\d\D", sample.response):
            sample.status = Sample.Status.COMPLETED
            return
        if sample.response_length == MAX_TOKENS:
            sample.status = Sample.Status.TRUNCATED
            return


def reward(options: Any, sample: Sample) -> float:
    """1 for the answer, 0.1 for another number."""
    numbers = re.findall(r"\d+", sample.response)
    return 1.0 if numbers[-1:] == [sample.label] else 0.1 * bool(numbers)


def run(options: argparse.Namespace, folder: Path) -> None:
    torch.set_num_threads(1)  # the model is too small for more
    tokenizer = AutoTokenizer.from_pretrained(options.hf_checkpoint)
    model = LlamaForCausalLM.from_pretrained(options.hf_checkpoint).eval()
    source = RolloutDataSourceWithBuffer(options)
    source.load()

    def generate_all(options: Any, samples: list[Sample]) -> None:
        for sample in samples:
            generate(model, tokenizer, sample)

    manager = RolloutManager(options, source, generate_all, reward)
    for rollout in range(source.get_metadata().get("num_rollouts", 0), options.num_rollout):
        groups = manager.generate(rollout)
        with (folder / "groups.jsonl").open("a") as file:
            file.write(
                json.dumps({"rollout": rollout, "groups": [[told(each) for each in one] for one in groups]}) + "\n"
            )
        source.update_metadata({"num_rollouts": rollout + 1})
        source.save(rollout)
        sys.stdout.write(f"rollout {rollout}: {len(groups)} groups done, {source.get_buffer_length()} go back\n")
        sys.stdout.flush()


def told(sample: Sample) -> dict[str, Any]:
    names = ("group_index", "index", "label", "response", "reward", "abort_count")
    return {name: getattr(sample, name) for name in names} | {"status": sample.status.value}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    options = add_data_arguments(parser).parse_args()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model" / "config.json").exists():
        make_model(folder / "model", write_prompts(folder / "prompts.jsonl"))
    options.prompt_data = options.prompt_data or str(folder / "prompts.jsonl")
    options.input_key, options.label_key = "question", "answer"
    options.apply_chat_template = options.rollout_shuffle = options.partial_rollout = True
    options.rollout_batch_size = options.rollout_batch_size or 4
    options.n_samples_per_prompt = max(2, options.n_samples_per_prompt)
    options.num_rollout = options.num_rollout or 8
    options.hf_checkpoint, options.save, options.load = str(folder / "model"), str(folder), str(folder)
    run(options, folder)


if __name__ == "__main__":
    main()
