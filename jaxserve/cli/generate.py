"""`jaxserve generate`: one prompt, one answer, streamed to stdout."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from jaxserve.cli import common

if TYPE_CHECKING:
    from jaxserve.completion import Completion
    from jaxserve.llm import LLM, Prompt
    from jaxserve.request import SamplingParams
    from jaxserve.text.tokenizer import Tokenizer


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="stream the answer to one prompt",
        description="Streams the answer to PROMPT to stdout.",
        allow_abbrev=False,
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the text; - reads it from stdin")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        action="store_true",
        help="PROMPT is a message of a chat; the default where the model has a chat template",
    )
    form.add_argument("--raw", action="store_true", help="continue the text of PROMPT as it is")
    parser.add_argument("--system", metavar="TEXT", help="system message of the chat")
    parser.add_argument("--n", type=int, metavar="N", help="answers; more than one needs --json")
    parser.add_argument("--json", action="store_true", help="print one object at the end")
    common.add_sampling_options(parser)
    common.add_engine_options(parser)
    common.add_deadline_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    config = common.read_config(args)
    sampling = common.read_sampling(args, **({} if args.n is None else {"n": args.n}))
    if sampling.n > 1 and not args.json:
        raise common.UsageError(f"--n {sampling.n} needs --json: only one answer can be streamed")
    if args.raw and args.system is not None:
        raise common.UsageError("--system belongs to a chat; it cannot go with --raw")
    text = _read_prompt(args.prompt)
    for name, value in (("PROMPT", text), ("--system", args.system or "")):
        _refuse_bad_text(name, value)

    from jaxserve.llm import LLM

    assembly = common.assemble(config, args)
    with LLM.from_assembly(assembly) as llm:
        prompt = _prompt(args, text, assembly.tokenizer)
        completion = _generate(llm, prompt, sampling, show=not args.json)
        if args.json:
            model, dtype = assembly.config.model.name, assembly.config.model.dtype
            report = {"model": model, "dtype": dtype, **_report(completion)}
            common.write_json({**report, "startup_s": assembly.startup})
    broken = [sample for sample in completion.outputs if sample.finish_reason == "error"]
    if broken:
        common.note(f"error: {broken[0].error}")
        return common.SOME_FAILED
    return common.DONE


def _read_prompt(argument: str) -> str:
    if argument != "-":
        return argument
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"the prompt on stdin is not valid UTF-8 at byte {error.start}"
        raise common.UsageError(message) from error


def _refuse_bad_text(name: str, text: str) -> None:
    """An argument that is not valid UTF-8 comes as half surrogate pairs."""
    from jaxserve.text.tokenizer import refuse_surrogates

    try:
        refuse_surrogates(text, name)
    except ValueError as error:
        raise common.UsageError(str(error)) from error


def _prompt(args: argparse.Namespace, text: str, tokenizer: "Tokenizer") -> "Prompt | list[Any]":
    """Chat messages, or the text itself."""
    has_template = tokenizer.chat_template is not None
    asks_for_chat = args.chat or args.system is not None
    if asks_for_chat and not has_template:
        raise common.UsageError("this model has no chat template; use --raw, without --system")
    if args.raw or not has_template:
        return text
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": text}]


def _generate(llm: "LLM", prompt: Any, sampling: "SamplingParams", *, show: bool) -> "Completion":
    try:
        stream = llm.stream(prompt, sampling)
    except ValueError as error:
        raise common.UsageError(common.one_line(error)) from error
    with stream:
        for chunk in stream:
            if show:
                common.write_out(chunk.text)
        if show:
            common.write_out("\n")
        return stream.completion()


def _report(completion: "Completion") -> dict[str, Any]:
    usage, timings = completion.usage, completion.timings
    rate = None
    if timings.ttft_s is not None and usage.completion_tokens > 1:
        rate = (usage.completion_tokens - 1) / max(1e-9, timings.total_s - timings.ttft_s)
    first = completion.outputs[0]
    return {
        "text": first.text,
        "finish_reason": first.finish_reason,
        "outputs": [
            {
                "index": sample.index,
                "text": sample.text,
                "token_ids": sample.token_ids,
                "finish_reason": sample.finish_reason,
            }
            for sample in completion.outputs
        ],
        "prompt_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "ttft_s": timings.ttft_s,
        "total_s": timings.total_s,
        "decode_tokens_per_s": rate,
    }
