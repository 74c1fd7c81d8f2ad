"""Names of columns -> roles: questions, answers, contexts, choices, thoughts, facts. Pure.

A name proposes a role of a column; the values of rows decide (side_columns, nearest).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .fields import QUESTIONS, is_filled

# Questions and answers. The usual names are exact; the others are names of one part of a row without usual names.
ANSWERS = ("response", "completion", "answer", "output", "target")
ASKED = (*QUESTIONS, "q", "user", "human", "src", "article", "document", "short_question")
ANSWERED = (
    *ANSWERS, "a", "assistant", "canonical_solution", "reference_solution", "solution", "tgt", "summary", "highlights",
    "sql", "cypher", "short_answer", "long_answer", "des",
)  # fmt: skip
DOCUMENTS = ("content", "raw_content", "document", "body", "markdown", "page_content", "contents", "abstract", "code")
# Pairs of names with a single meaning: a question and its answer. For other names, the user decides.
SURE_PAIRS = (
    ("problem", "solution"), ("problem", "answer"), ("question", "answer"), ("question", "response"),
    ("question", "solution"), ("query", "answer"), ("user", "assistant"), ("human", "assistant"), ("input", "output"),
    ("input", "target"), ("source", "target"), ("src", "tgt"), ("q", "a"), ("prompt", "output"), ("prompt", "answer"),
    ("instruction", "completion"), ("instruction", "answer"), ("article", "highlights"), ("article", "summary"),
    ("document", "summary"), ("dialogue", "summary"),
)  # fmt: skip
COMPARED = (  # a better and a worse answer
    ("chosen", "rejected"), ("preferred", "non_preferred"), ("preferred", "dispreferred"), ("better", "worse"),
    ("best", "worst"), ("winner", "loser"),
)  # fmt: skip
GOLD = re.compile(r"(?i)^(expected|correct|gold|reference)_|(^|_)(answer|solution|response|summary|ground_truth)$")
# Names of texts with the answer to another text of the row; a title or a licence is no answer.
OF_ANSWERS = re.compile(
    r"(?i)(^|_)(responses?|completions?|answers?|outputs?|targets?|code|summary|translation|reply|headline|highlights|"
    r"solution|caption|paraphrase|correction|simplified|definition|entities|gloss(es)?|intent|sentiment|label)(_|$)|"
    r"^(expected|correct|gold|reference)_|^(reason|explanation|rationale)$"
)
CLASSES = re.compile(r"(?i)(.*_)?(labels?|intent|sentiment|class)")  # of a text, also in numbers
NO_ANSWER = re.compile(
    r"(?i)prompt|^(prev|previous|last)_|^(system|notes?|comments?|remarks?|names?|journal|authors?|publisher|slug|"
    r"tags|keywords|filename|title|original|(doc)?tests?|stop_tokens|(.*_)?(signature|name))$"
)

# Contexts: the topic or a part of a question.
FIRST = ("definition", "instruction")  # the first of two texts of a question
CONTEXTS = (*FIRST, "context", "contexts", "passage", *QUESTIONS)
# Columns of facts may have these names, too: a question's topic has several words, and is longer than the question.
LONG_CONTEXTS = (
    "passages", "article", "story", "document", "documents", "paragraph", "paragraphs", "text", "table", "evidence",
    "abstract", "background", "chunk", "code", "ctx", "dialogue", "excerpt", "hint", "knowledge", "lecture", "premise",
    "scenario", "snippet", "sql_context", "support", "transcript",
)  # fmt: skip
INPUTS = ("context", "combined_context", "passage", "schema", "schema_text", "ddl", "evidence", "input")

# Thoughts: of the answer, or of any text.
THOUGHTS = ("reasoning", "reasoning_content", "thinking", "thoughts", "chain_of_thought", "cot")
OF_THOUGHTS = re.compile(r"(?i)think|thought|reason|(^|_)cot(_|$)|trajector|rationale")
# Names of texts with the solution of an answer, without the texts of judges (quality_explanation, rating_rationale).
WORKED = re.compile(
    r"(?i)((complex|detailed|full|generated|gold|model|worked|step_by_step|gpt\d*|deepseek|r1)_)?"
    r"(solution|rationale|explanation|reasoning(_content|_trace)?|think|thinking|thoughts?|cot|chain_of_thought)"
)
OF_JUDGES = re.compile(r"(?i)reason|explanation|rationale|comment|notes?$|critique|feedback|judg|margin")

# Facts about a row, and columns of facts.
OF_FACTS = re.compile(
    r"(?i)^(num|is|has)_|(^|_)(ids?|idx|index|uuid|hash|sha\d*|type|source|model|provider|date|datetime|time|timestamp|"
    r"ts|key|url|path|lang|language|license|ext|extension|split|subset|category|version|dump|difficulty|level|subject|"
    r"topic|domain|title)$"
)
METADATA = re.compile(r"(?i)meta|info|signals|extra|tags|stats|urls|config")

# Choices: in a list, or in a column each: option_a, choice1, opB, or only a capital letter.
CHOICES = ("choices", "options", "endings", "answer_choices", "answer_options", "candidates")
ALTERNATIVES = {*CHOICES, "answers", "completions", "responses", "generations"}  # not conversations
CHOICE_STEMS = ("", "option_", "option", "Option_", "Option", "op", "choice_", "choice", "ans")
CHOICE_QUESTIONS = ("question", "Question", "problem", "query")
CHOICE_ANSWERS = (
    "answer", "Answer", "correct_answer", "correctAnswer", "correct_option", "correctOption", "correct", "answer_key",
)  # fmt: skip
_CHOICE = re.compile(r"((?i:options?|choices?|opt?|alternative|ans(?:wer)?)[_ .-]?)?([A-J]|(?<=.)[a-j\d])")


def columns_of_choices(row: Mapping[str, Any]) -> dict[str, str]:
    """Return letter or number -> column, for columns of one choice each: option_a and option_b, or A, B and C."""
    by_stem: dict[str, dict[str, str]] = {}
    for name in row:
        if (matched := _CHOICE.fullmatch(name)) and is_filled(row[name]):
            by_stem.setdefault((matched[1] or "").lower(), {})[matched[2].lower()] = name
    for stem, names in by_stem.items():
        if any(names.keys() >= {*first} for first in (("ab", "12", "01") if stem else ("abc",))):
            return names
    return {}
