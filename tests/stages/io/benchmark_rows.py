"""Generated rows in the layouts of known benchmarks, with right and wrong answers and columns that no field takes."""

from __future__ import annotations

from typing import Any

TEST = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-3) == -6\n"
HEAD = 'def double(x):\n    """Return x twice."""\n'
IFEVAL = {"key": 7, "prompt": "Name a fruit. Use no comma.", "instruction_id_list": ["punctuation:no_comma", "en:length_constraints:number_words"],
          "kwargs": [{"num_words": None, "relation": None}, {"num_words": 3, "relation": "less than"}]}  # fmt: skip
FOUR = ["red", "blue", "green", "black"]

BENCHMARKS: dict[str, tuple[str, dict[str, Any], str, list[str], list[str], set[str]]] = {
    # name: layout, row, verifier, right answers, wrong answers, columns reported as not taken
    "GSM8K": ("gsm8k", {"question": "2 times 600?", "answer": "It is 2*600=<<2*600=1200>>1200.\n#### 1,200"}, "numeric",
              ["The answer is 1200.", "#### 1,200"], ["2", "The answer is 1201"], set()),
    "MATH number": ("math", {"problem": "Half of 3?", "level": "Level 1", "type": "Algebra", "solution": "So \\boxed{\\frac{3}{2}}."}, "numeric",
                    ["\\boxed{3/2}", "\\boxed{1.5}"], ["\\boxed{2/3}"], {"level"}),
    "MATH text": ("math", {"problem": "Where?", "level": "Level 2", "type": "Geometry", "solution": "So \\boxed{(3, \\pi)}."}, "exact",
                  ["It is \\boxed{(3, \\pi)}."], ["\\boxed{(3, 3)}"], {"level"}),
    "IFEval": ("ifeval", IFEVAL, "constraints", ["An apple"], ["Apple, pear", "An apple or pear"], set()),
    "HumanEval": ("humaneval", {"task_id": "HumanEval/0", "prompt": HEAD, "entry_point": "double", "canonical_solution": "    return 2 * x\n",
                                "test": TEST}, "code",
                  ["    return x + x\n", f"```python\n{HEAD}    return x * 2\n```"], ["    return x * x\n"], set()),
    "MBPP": ("mbpp", {"text": "Double a number.", "code": "def f(x):\r\n    return 2 * x", "task_id": 3, "test_setup_code": "K = 4",
                      "test_list": ["assert f(2) == K"], "challenge_test_list": ["assert f(-3) == -6"]}, "code",
             ["```python\ndef f(x):\n    return x + x\n```"], ["def f(x):\n    return x * x"], set()),
    "MBPP sanitized": ("mbpp", {"prompt": "Double a number.", "code": "def f(x): return 2 * x", "task_id": 3, "source_file": "a",
                                "test_imports": ["import math"], "test_list": ["assert math.isclose(f(2), 4)"]}, "code",
                       ["def f(x):\n    return x + x"], ["def f(x):\n    return 5"], {"source_file"}),
    "ARC": ("arc", {"id": "A1", "question": "Sky?", "choices": {"text": FOUR, "label": ["1", "2", "3", "4"]}, "answerKey": "2"}, "choice",
            ["B", "(B) blue", "blue"], ["A", "2", "red"], set()),
    "HellaSwag": ("hellaswag", {"ind": 4, "activity_label": "Painting", "ctx_a": "He takes", "ctx_b": "", "ctx": "He takes", "endings": FOUR,
                                "source_id": "s", "split": "val", "split_type": "indomain", "label": "3"}, "choice",
                  ["D", "black."], ["C", "none"], {"ind", "ctx_a", "source_id", "split_type"}),
    "MMLU": ("mmlu", {"question": "Sky?", "subject": "physics", "choices": FOUR, "answer": 1}, "choice", ["B.", "The answer is B."], ["D"], set()),
    "MMLU-Pro": ("mmlu_pro", {"question_id": 70, "question": "Sky?", "options": FOUR, "answer": "B", "answer_index": 1, "cot_content": "",
                              "category": "physics", "src": "x"}, "choice", ["**B**"], ["A"], {"answer_index", "src"}),
    "WinoGrande": ("winogrande", {"sentence": "Ann thanked Eve since _ helped.", "option1": "Ann", "option2": "Eve", "answer": "2"}, "choice",
                   ["B", "Eve"], ["A", "Ann"], set()),
    "BoolQ": ("boolq", {"question": "is grass green", "passage": "Grass is green.", "answer": True}, "choice",
              ["Yes", "yes, it is"], ["No", "Nobody"], set()),
    "PIQA": ("piqa", {"goal": "Boil water", "sol1": "Heat it", "sol2": "Cool it", "label": 0}, "choice", ["A) Heat it"], ["B", "A dog"], set()),
    "BLiMP": ("blimp", {"sentence_good": "Cats sleep.", "sentence_bad": "Cats sleeps.", "field": "syntax", "UID": "agreement", "pair_id": "0"},
              "choice", ["Cats sleep."], ["Cats sleeps."], {"field", "pair_id"}),
    "TruthfulQA-MC": ("truthfulqa_mc", {"question": "Moon?", "mc1_targets": {"choices": ["rock", "cheese"], "labels": [1, 0]},
                                        "mc2_targets": {"choices": ["rock", "stone", "cheese"], "labels": [1, 1, 0]}},
                      "choice", ["rock"], ["cheese"], {"mc2_targets"}),
    "needle": ("needle", {"context": "Much text. The key is 77.", "question": "Which key?", "needle": "The key is 77.", "answer": "77", "depth": 0.5},
               "regex", ["It is 77."], ["It is 7."], {"depth"}),
    "RULER": ("ruler", {"index": 0, "input": "Text. Which numbers?", "outputs": ["42", "17"], "length": 9}, "weighted", ["17 and 42"], ["43"],
              {"index", "length"}),
}  # fmt: skip
