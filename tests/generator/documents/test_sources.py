"""Document sources: determinism, lengths under a real tokenizer, clusters and splits, and lines for faulty files."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fixtures.byte_level import CHAT, byte_level_tokenizer
from fixtures.refusals import refused
from transformers import PreTrainedTokenizerFast

from kvdrift.generator.documents import files, registry
from kvdrift.generator.documents.registry import stratum_documents
from kvdrift.generator.documents.ruler import GENERATED
from kvdrift.generator.documents.source import Candidate
from kvdrift.generator.embedded.documents import make_document
from kvdrift.generator.transformer.files.tokenizer import load_tokenizer
from kvdrift.schema.document import Document, part_of, split_of
from kvdrift.schema.errors import InputError
from kvdrift.schema.study import DocumentsSection

QUESTIONS = [f"Who wrote book number {number}?" for number in range(60)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer()


def section(source: str, **keys: Any) -> DocumentsSection:
    return DocumentsSection(**({"source": source, "length": 4096, "development": 2, "evaluation": 5} | keys))


def choose_candidates(part: DocumentsSection, seed: int) -> dict[str, list[Candidate]]:
    """Choose the documents of a study of one section."""
    (chosen,) = registry.choose_candidates([part], seed)
    return chosen


def take(part: DocumentsSection, tokenizer: Any, seed: int = 0) -> dict[str, list[Document]]:
    return stratum_documents(part, seed, lambda: tokenizer)


def made_document(task: str, tokenizer: Any, length: int = 4096) -> Document:
    """Return a document of a task of RULER that is generated."""
    part = section("ruler", tasks=[task], length=length, evaluation=2)
    (document, _) = take(part, tokenizer)["evaluation"]
    return document


def everything(part: DocumentsSection, tokenizer: Any, seed: int = 0) -> list[Document]:
    return [document for documents in take(part, tokenizer, seed).values() for document in documents]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def passages(count: int, words: int = 20) -> list[dict[str, str]]:
    return [{"title": f"Title {number}", "text": f"passage{number} " * words} for number in range(count)]


@pytest.fixture(scope="module")
def helmet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small copy of HELMET: three rows to each of 60 questions, worked examples, and citations."""
    folder = tmp_path_factory.mktemp("helmet")
    rows = [
        {"question": q, "answers": [f"Author {q[-3:-1]}"], "ctxs": passages(20), "depth": d}
        for q in QUESTIONS
        for d in range(3)
    ]
    write_lines(folder / "data/kilt/nq-dev-multikilt_1000_k20_dep6.jsonl", rows)
    shown = [{"question": q, "answers": ["Somebody"], "ctxs": passages(3)} for q in ["Why?", "When?", QUESTIONS[0]]]
    write_lines(folder / "data/kilt/nq-train-multikilt_1000_k3_dep6.jsonl", shown)
    popular = [
        {"question": q, "answers": ["Ann"], "ctxs": passages(3), "s_pop": 10 ** (n % 6)}
        for n, q in enumerate(QUESTIONS)
    ]
    write_lines(folder / "data/kilt/popqa_test_1000_k20_dep6.jsonl", popular)
    cited = [
        {"question": q, "qa_pairs": [{"question": "?", "short_answers": ["One", "1"]}], "docs": passages(30)}
        for q in QUESTIONS
    ]
    (folder / "data/alce").mkdir()
    (folder / "data/alce/asqa_eval_gtr_top2000.json").write_text(json.dumps(cited, indent=1))
    (folder / "prompts").mkdir()
    (folder / "prompts/asqa_revised.json").write_text(json.dumps({
        "instruction": "Instruction: cite.",
        "demo_prompt": "{instruction}\n\nQuestion: {question}\n\n{context}\n\nAnswer: {answer}",
        "doc_prompt": "Document [{ID}](Title: {title}): {text}",
        "demos": [{"question": f"Shown {n}?", "answer": "Yes [1].", "docs": passages(2)} for n in range(3)],
    }))  # fmt: skip
    return folder


class TestRulerGenerated:
    """The six tasks that are made here."""

    @pytest.mark.parametrize("task", GENERATED)
    @pytest.mark.parametrize("length", [2048, 4096])
    @pytest.mark.by_default("2048")
    def test_prompt_and_answer_fill_the_length_and_keep_within_it(self, tokenizer: Any, task: str, length: int) -> None:
        document = made_document(task, tokenizer, length)
        room = length - GENERATED[task].generated_tokens
        assert 0.9 * room < document.prompt_tokens <= room
        text = tokenizer.decode(document.tokens)
        assert list(document.tokens) == tokenizer(text)["input_ids"]
        assert all(answer in text for answer in document.answers)

    def test_a_chain_leads_to_every_answer(self, tokenizer: Any) -> None:
        document = made_document("vt", tokenizer)
        asked = tokenizer.decode(document.tokens).rpartition("Memorize and track")[2]
        (value,) = re.findall(r"assigned the value (\d+) in", asked)
        held = {name for name, number in re.findall(r"VAR ([A-Z]+) = (\d+)", asked) if number == value}
        for name, previous in re.findall(r"VAR ([A-Z]+) = VAR ([A-Z]+) \n", asked):
            assert previous in held  # links stand in their order
            held.add(name)
        assert held == set(document.answers)
        assert len(held) == 5

    @pytest.mark.parametrize(("task", "count"), [("cwe", 10), ("fwe", 3)])
    def test_answers_are_the_most_frequent_words(self, tokenizer: Any, task: str, count: int) -> None:
        document = made_document(task, tokenizer)
        text = tokenizer.decode(document.tokens)
        if task == "cwe":
            words = Counter(re.findall(r"\d+\. ([^\d]+?)(?= \d+\.|\n)", text.rpartition("Below is a numbered")[2]))
        else:
            words = Counter(re.findall(r"\b[a-z]{6}\b", text.partition("coded words. ")[2].partition("\nQuestion")[0]))
        assert {word for word, _ in words.most_common(count)} == set(document.answers)
        if task == "cwe":  # 30 times each of ten common words, three times each other one
            assert set(words.values()) == {30, 3}
        else:  # counts n / (k^2 zeta(2)) of ranks k = 2, 3, 4, cut to whole numbers
            shares = [count * rank**2 for rank, (_, count) in enumerate(words.most_common(3), start=2)]
            assert max(shares) - min(shares) < 4**2

    @pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_2", "niah_multikey_3"])
    def test_a_needle_is_hidden_once_among_others_of_the_benchmarks_kinds(self, tokenizer: Any, task: str) -> None:
        document = made_document(task, tokenizer)
        kind, text = "uuid" if task == "niah_multikey_3" else "number", tokenizer.decode(document.tokens)
        needles = re.findall(rf"special magic {kind}s for (\S+) is: (\S+)\.", text)
        (asked,) = re.findall(rf"What is the special magic {kind} for (.*?) mentioned", text)
        assert [value for key, value in needles if key == asked] == list(document.answers)
        assert len(needles) == 1 if task == "niah_single_1" else len(needles) > 20
        uuid = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
        for key, value in needles:
            assert re.fullmatch(uuid if kind == "uuid" else r"[\w'-]+-[\w'-]+", key)
            assert re.fullmatch(uuid if kind == "uuid" else r"\d{7}", value)

    def test_same_seed_same_documents_and_more_of_them_move_none(self, tokenizer: Any) -> None:
        part = section("ruler", tasks=["niah_single_1", "fwe"], length=2048)
        first = take(part, tokenizer, seed=3)
        more = take(part.model_copy(update={"development": 4, "evaluation": 9}), tokenizer, seed=3)
        for split, documents in first.items():
            assert more[split][: len(documents)] == documents
        assert take(part, tokenizer, seed=3) == first
        assert take(part, tokenizer, seed=4) != first
        assert Counter(document.task for document in more["evaluation"]) == {"niah_single_1": 5, "fwe": 4}

    def test_chat_prompts_keep_within_the_length_and_end_with_the_answers_opening(self, tokenizer: Any) -> None:
        part = section("ruler", tasks=["niah_multikey_3"], chat_template=True, evaluation=2)
        for document in everything(part, tokenizer):
            text = tokenizer.decode(document.tokens)
            assert text.startswith("<user>")
            assert re.search(
                r"<assistant> The special magic uuid for [0-9a-f-]+ mentioned in the provided text is$", text
            )
            assert document.prompt_tokens <= 4096 - 128

    def test_too_short_a_length_is_said(self, tokenizer: Any) -> None:
        line = refused(take, section("ruler", tasks=["vt"], length=200), tokenizer)
        assert "length 200 " in line


class TestRulerFiles:
    """The benchmark's own files."""

    def rows(self, count: int = 40) -> list[dict[str, Any]]:
        return [
            {"index": n, "input": f"Documents.\n\nQuestion: {QUESTIONS[n // 2]}", "outputs": [str(n)], "length": 60, "answer_prefix": " Answer:"}
            for n in range(count)
        ]  # fmt: skip

    @pytest.mark.parametrize(
        "place", ["qa_1/validation_4096.jsonl", "4096/qa_1/validation.jsonl", "4096/data/qa_1/validation.jsonl"]
    )
    def test_rows_of_one_question_are_one_cluster(self, tokenizer: Any, tmp_path: Path, place: str) -> None:
        write_lines(tmp_path / place, self.rows())
        documents = everything(
            section("ruler", tasks=["qa_1"], path=str(tmp_path), development=2, evaluation=12), tokenizer
        )
        assert {document.cluster for document in documents} <= {question.lower().rstrip("?") for question in QUESTIONS}
        for document in documents:
            number = int(document.answers[0])
            assert tokenizer.decode(document.tokens) == f"Documents.\n\nQuestion: {QUESTIONS[number // 2]} Answer:"
            assert document.doc == f"qa_1-4096-{number:05d}"

    def test_older_files_have_the_opening_inside(self, tokenizer: Any, tmp_path: Path) -> None:
        old = [
            {name: value for name, value in row.items() if name != "answer_prefix"}
            | {"input": row["input"] + " Answer:"}
            for row in self.rows()
        ]
        write_lines(tmp_path / "new/qa_1/validation_4096.jsonl", self.rows())
        write_lines(tmp_path / "old/qa_1/validation_4096.jsonl", old)
        new, older = (
            everything(section("ruler", tasks=["qa_1"], path=str(tmp_path / name)), tokenizer)
            for name in ("new", "old")
        )
        assert new == older

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"outputs": None}, r"validation_4096.jsonl, line 3: field 'outputs' .*index, "),
            ({"input": 7}, r"line 3: field 'input': expected text, not 7"),
            ({"outputs": [7]}, r"line 3: field 'outputs': expected a list of texts, not \[7\]"),
            ({"length": 5000}, r"line 3: field 'length': 5000 tokens, above the stratum's length = 4096"),
            ({"input": "No more."}, r"line 3: field 'input': .*'Question: "),
        ],
    )  # fmt: skip
    def test_faulty_rows_are_one_line(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        rows = self.rows()
        rows[2] |= change
        write_lines(tmp_path / "qa_1/validation_4096.jsonl", rows)
        with pytest.raises(InputError, match=message):
            choose_candidates(section("ruler", tasks=["qa_1"], path=str(tmp_path), evaluation=30), 0)

    @pytest.mark.parametrize(
        ("row", "plain", "chat"),
        [
            # EleutherAI/lm-evaluation-harness#3403, with the space of RULER's own templates
            ({"gen_prefix": " The number is"}, "What is it? The number is", "What is it?</user><assistant> The number is"),
            # rows as the harness makes them: without that space, which it puts into plain prompts alone
            ({"gen_prefix": "The number is"}, "What is it? The number is", "What is it?</user><assistant>The number is"),
            # EleutherAI/lm-evaluation-harness#3231: a space is not doubled, and one at the end stays
            ({"input": "What is it?\n", "gen_prefix": "Answer: "}, "What is it?\nAnswer: ", "it?\n</user><assistant>Answer: "),
            # NVIDIA/RULER#107: a base model went on with the haystack without it
            ({"answer_prefix": " The number is"}, "What is it? The number is", "What is it?</user><assistant> The number is"),
            ({"answer_prefix": " N are: ", "gen_prefix": "N are:"}, "What is it? N are: ", "it?</user><assistant> N are: "),
            ({"answer_prefix": "", "gen_prefix": "N:"}, "What is it? N:", "What is it?</user><assistant>N:"),
            ({"answer_prefix": None}, "What is it?", "What is it?</user><assistant>"),
        ],
    )  # fmt: skip
    def test_the_opening_of_the_answer_ends_the_prompt(
        self, tokenizer: Any, tmp_path: Path, row: dict[str, Any], plain: str, chat: str
    ) -> None:
        rows = [{"index": n, "input": "What is it?", "outputs": [str(n)], "length": 140} | row for n in range(40)]
        write_lines(tmp_path / "niah_single_1/validation_4096.jsonl", rows)
        part = section("ruler", tasks=["niah_single_1"], path=str(tmp_path))
        for document in everything(part, tokenizer):
            assert tokenizer.decode(document.tokens) == plain
        for document in everything(part.model_copy(update={"chat_template": True}), tokenizer):
            assert tokenizer.decode(document.tokens).endswith(chat)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"answer_prefix": " A:", "gen_prefix": "B:"}, "fields 'answer_prefix' and 'gen_prefix': ' A:' and 'B:' "),
            ({"gen_prefix": 3}, "field 'gen_prefix': expected text, not 3"),
            ({"outputs": ["1", ""]}, """field 'outputs': "" is empty, """),
            ({"outputs": [" 1"]}, """field 'outputs': " 1" is empty, begins """),
            ({"outputs": ["1\t2"]}, """field 'outputs': "1\\t2" is empty, begins """),
        ],
    )
    def test_openings_and_answers_that_contradict_the_benchmark_are_one_line(
        self, tokenizer: Any, tmp_path: Path, change: dict[str, Any], message: str
    ) -> None:
        rows = [row | change for row in self.rows()]
        write_lines(tmp_path / "qa_1/validation_4096.jsonl", rows)
        line = refused(take, section("ruler", tasks=["qa_1"], path=str(tmp_path)), tokenizer)
        assert re.search(rf"validation_4096.jsonl, line \d+: {re.escape(message)}", line)

    def test_broken_json_and_missing_files_are_one_line(self, tmp_path: Path) -> None:
        part = section("ruler", tasks=["qa_1"], path=str(tmp_path))
        assert "qa_1/validation_4096.jsonl: no such file" in refused(choose_candidates, part, 0)
        write_lines(tmp_path / "qa_1/validation_4096.jsonl", self.rows(1)).open("a").write("{broken\n")
        assert "validation_4096.jsonl, line 2: " in refused(choose_candidates, part, 0)


class TestHelmet:
    """A local copy of HELMET."""

    def test_questions_are_clusters_and_each_is_used_once_first(self, tokenizer: Any, helmet: Path) -> None:
        part = section("helmet", tasks=["nq"], path=str(helmet), development=4, evaluation=20)
        splits = take(part, tokenizer, seed=1)
        clusters = {split: [document.cluster for document in documents] for split, documents in splits.items()}
        assert not set(clusters["development"]) & set(clusters["evaluation"])
        assert all(len(set(names)) == len(names) for names in clusters.values())
        assert all(split_of(name) == split for split, names in clusters.items() for name in names)
        assert take(part, tokenizer, seed=1) == splits
        assert take(part, tokenizer, seed=2) != splits
        many = choose_candidates(part.model_copy(update={"evaluation": 90}), 1)["evaluation"]
        assert max(Counter(item.cluster for item in many).values()) <= 3
        assert len({item.cluster for item in many[:35]}) == 35

    def test_a_rag_prompt(self, tokenizer: Any, helmet: Path) -> None:
        for document in everything(section("helmet", tasks=["nq"], path=str(helmet), length=4096), tokenizer):
            text = tokenizer.decode(document.tokens)
            question = text.rpartition("Question: ")[2].removesuffix("\nAnswer:")
            assert question in QUESTIONS
            assert document.answers == (f"Author {question[-3:-1]}",)
            assert text.count("\nAnswer: Somebody\n\n") == 2  # worked examples, of other questions
            assert text.partition("Question: " + question)[2] == "\nAnswer:"
            assert document.prompt_tokens <= 4096 - 20

    def test_passages_that_do_not_fit_are_left_out_from_the_last_on(self, tokenizer: Any, tmp_path: Path) -> None:
        rows = [{"question": q, "answers": ["Ann"], "ctxs": passages(20, words=80)} for q in QUESTIONS]
        write_lines(tmp_path / "nq-dev-multikilt_1000_k20_dep6.jsonl", rows)  # files may lie in the folder itself
        for document in everything(section("helmet", tasks=["nq"], path=str(tmp_path), shots=0), tokenizer):
            titles = re.findall(r"Title: Title (\d+)", tokenizer.decode(document.tokens))
            assert titles == [str(number) for number in range(len(titles))]
            assert 2 <= len(titles) < 20
            assert 4096 - 20 - 80 * 12 < document.prompt_tokens <= 4096 - 20

    def test_a_citation_prompt_is_a_chat_unless_told_otherwise(self, tokenizer: Any, helmet: Path) -> None:
        part = section("helmet", tasks=["asqa"], path=str(helmet))
        for document in everything(part, tokenizer):
            text = tokenizer.decode(document.tokens)
            assert text.startswith("<system>")
            assert text.endswith("</user><assistant>")
            assert text.count("Instruction: cite.") == 3
            assert "Document [8](Title: Title 7)" in text
            assert "Document [9]" not in text  # 8 passages at 4K
            assert document.answers == ("One",)
            assert document.prompt_tokens <= 4096 - 300
        plain = everything(part.model_copy(update={"chat_template": False}), tokenizer)
        assert all(tokenizer.decode(document.tokens).endswith("\n\nAnswer:") for document in plain)

    @pytest.mark.parametrize(("answer", "chat"), [("The", True), ("The", False), ("!", None), ("E.", False)])
    def test_an_answer_that_every_continuation_states_is_refused(
        self, tokenizer: Any, tmp_path: Path, answer: str, *, chat: bool | None
    ) -> None:
        """HELMET scores a plain continuation after "Answer:", which states the letter E, and a chat's without it."""
        rows = [{"question": q, "answers": ["Ann", answer], "ctxs": passages(3)} for q in QUESTIONS]
        write_lines(tmp_path / "nq-dev-multikilt_1000_k20_dep6.jsonl", rows)
        part = section("helmet", tasks=["nq"], path=str(tmp_path), shots=0, chat_template=chat)
        line = refused(take, part, tokenizer)
        (number,) = re.findall(r"k20_dep6.jsonl, line (\d+): field 'answers': ", line)
        assert f"'{answer}'" in line
        (excluded,) = re.findall(r"\{.*\}", line)
        assert json.loads(excluded)["clusters"] == [QUESTIONS[int(number) - 1].lower().rstrip("?")]
        if answer == "E.":
            assert take(part.model_copy(update={"chat_template": True}), tokenizer)

    def test_popular_subjects_are_left_out(self, helmet: Path) -> None:
        chosen = choose_candidates(section("helmet", tasks=["popqa"], path=str(helmet)), 0)
        assert all(item.number % 6 < 3 for items in chosen.values() for item in items)

    def test_parts_share_no_question(self, helmet: Path) -> None:
        taken = []
        for number in (1, 2):
            part = section("helmet", tasks=["nq"], path=str(helmet), part=f"{number}/2", development=3, evaluation=15)
            chosen = choose_candidates(part, 0)
            taken.append({item.cluster for items in chosen.values() for item in items})
            assert all(part_of(cluster, 2) == number for cluster in taken[-1])
        assert not taken[0] & taken[1]

    def test_a_source_with_too_few_clusters_says_so(self, helmet: Path) -> None:
        part = section("helmet", tasks=["nq"], path=str(helmet), development=90, evaluation=90, stratum="h")
        assert [len({item.cluster for item in items}) for items in choose_candidates(part, 0).values()] == [30, 30]
        line = refused(choose_candidates, part.model_copy(update={"evaluation": 91}), 0)
        assert re.fullmatch(r"documents 'h': .* = 90 .* = 91, .* 180 document.* 60 cluster.* at most 180 .*", line)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"demos": None}, "field 'demos' "),
            ({"doc_prompt": "{number}: {text}"}, "fields 'demo_prompt' and 'doc_prompt': expected HELMET's placeholders, not 'number'"),
            ({"demos": [{"question": "?"}]}, "demos[0] of the object: field 'docs' "),
        ],
    )  # fmt: skip
    def test_faulty_prompt_files_are_one_line(
        self, tokenizer: Any, helmet: Path, tmp_path: Path, change: dict[str, Any], message: str
    ) -> None:
        forms = json.loads((helmet / "prompts/asqa_revised.json").read_text()) | change
        (tmp_path / "asqa_revised.json").write_text(json.dumps(forms))
        (tmp_path / "asqa_eval_gtr_top2000.json").write_text(
            (helmet / "data/alce/asqa_eval_gtr_top2000.json").read_text()
        )
        line = refused(take, section("helmet", tasks=["asqa"], path=str(tmp_path)), tokenizer)
        assert re.search(f"asqa_revised.json, .*{re.escape(message)}", line)

    def test_missing_worked_examples_are_said(self, tokenizer: Any, helmet: Path) -> None:
        line = refused(take, section("helmet", tasks=["popqa"], path=str(helmet)), tokenizer)
        assert re.search(r"popqa_test_1000_k3_dep6\.jsonl: .* popqa \(shots = 0 ", line)

    def test_too_few_worked_examples_are_said_of_their_file(self, tokenizer: Any, helmet: Path) -> None:
        line = refused(take, section("helmet", tasks=["nq"], path=str(helmet), shots=4), tokenizer)
        assert line.startswith(f"{helmet / 'data/kilt/nq-train-multikilt_1000_k3_dep6.jsonl'}: ")
        assert re.search(r"only [23] .* than nq-dev-multikilt_1000_k20_dep6\.jsonl, line \d+; write fewer shots$", line)


class TestJsonl:
    """Prompts of one's own."""

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"id": f"p{n}", "prompt": f"Prompt {n} says", "cluster": f"c{n // 3}", "answers": str(n)} for n in range(60)
        ]

    def test_rows_in_their_order_with_their_clusters(self, tokenizer: Any, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "mine.jsonl", self.rows())
        splits = take(
            section("jsonl", path=str(path), development=4, evaluation=8, length=20, stratum="mine"), tokenizer
        )
        for split, documents in splits.items():
            numbers = [int(document.doc[1:]) for document in documents]
            assert numbers == sorted(numbers)
            texts = [tokenizer.decode(document.tokens) for document in documents]
            assert texts == [f"Prompt {n} says" for n in numbers]
            assert all(split_of(document.cluster) == split and document.stratum == "mine" for document in documents)

    def test_rows_of_another_stratum_are_left_out(self, tmp_path: Path) -> None:
        rows = [row | {"stratum": "one" if n % 2 else "two"} for n, row in enumerate(self.rows())]
        path = write_lines(tmp_path / "mine.jsonl", rows)
        chosen = choose_candidates(section("jsonl", path=str(path), stratum="one"), 0)
        assert all(item.number % 2 for items in chosen.values() for item in items)
        line = refused(choose_candidates, section("jsonl", path=str(path)), 0)
        assert re.match(rf"""documents 'JSONL-4096': .* 0 .*{path} .* 'one', 'two': .* stratum = "one",""", line)

    @pytest.mark.parametrize("count", [0, 2])
    def test_a_file_of_too_few_rows_is_named(self, tmp_path: Path, count: int) -> None:
        path = write_lines(tmp_path / "mine.jsonl", self.rows()[:count])
        line = refused(choose_candidates, section("jsonl", path=str(path), development=4), 0)
        assert line.endswith(f"; {path} has {count} row(s) for it")

    def test_a_byte_order_mark_is_no_part_of_a_file(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "mine.jsonl", self.rows())
        plain = choose_candidates(section("jsonl", path=str(path)), 0)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert choose_candidates(section("jsonl", path=str(path)), 0) == plain

    def test_another_encoding_is_named(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "mine.jsonl", self.rows())
        path.write_bytes(path.read_text().encode("utf-16"))
        line = refused(choose_candidates, section("jsonl", path=str(path)), 0)
        assert re.match(f"{path}: .*UTF-8.* byte 0 ", line)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"id": "p0"}, "mine.jsonl, line 2: field 'id': 'p0' .* line 1"),
            ({"prompt": ""}, "line 2: field 'prompt': .* empty"),
            ({"prompt": None}, "line 2: field 'prompt' .* id, prompt, cluster, answers"),
            ({"id": ""}, "line 2: field 'id': .* empty$"),
            ({"cluster": ""}, "line 2: field 'cluster': .* empty; "),
            ({"stratum": ""}, "line 2: field 'stratum': .* empty; "),
            ({"answers": ["1", " "]}, "line 2: field 'answers': .* empty"),
            ({"answers": [], "scoring": "any"}, "line 2: field 'scoring': 'any' must be all, part or normalized"),
            ({"prompt": "a \ud800"}, r'line 2: field \'prompt\': has "\\ud800"'),
            ({"answers": ["\udfff"]}, r'line 2: field \'answers\': has "\\udfff"'),
            ({"prompt": "word " * 30}, "line 2: field 'prompt': [0-9]+ tokens, above the stratum's length = 20"),
        ],
    )  # fmt: skip
    def test_faulty_rows_are_one_line(
        self, tokenizer: Any, tmp_path: Path, change: dict[str, Any], message: str
    ) -> None:
        rows = self.rows()
        rows[1] |= change
        path = write_lines(tmp_path / "mine.jsonl", rows)
        with pytest.raises(InputError, match=message):
            take(section("jsonl", path=str(path), length=20, development=6, evaluation=40), tokenizer)


def test_embedded_documents_are_those_of_their_numbers() -> None:
    splits = stratum_documents(section("embedded", tasks=["needle"], length=384, stratum="n"), seed=7)
    for split, documents in splits.items():
        numbers = [number for number in range(200) if split_of(f"needle-384-{number:05d}") == split]
        for number, document in zip(numbers, documents, strict=False):
            assert document.tokens == make_document("needle", 384, number, 7).tokens
            assert document.stratum == "n"


@pytest.mark.parametrize(
    ("source", "keys", "message"),
    [
        ("rulre", {"tasks": ["vt"]}, "unknown source 'rulre'; did you mean 'ruler'?"),
        ("ruler", {"tasks": ["niah_single_4"]}, "unknown task 'niah_single_4'; did you mean 'niah_single_"),
        ("ruler", {"tasks": ["qa_1"]}, "task 'qa_1' needs RULER's files: set path"),
        ("ruler", {"tasks": ["vt"], "shots": 1}, "source 'ruler' takes no 'shots'"),
        ("ruler", {"tasks": ["vt", "vt"]}, "task 'vt' is listed twice"),
        ("ruler", {}, "tasks is missing; the tasks of source 'ruler' are niah_single_1, "),
        ("helmet", {"tasks": ["nq"]}, "source 'helmet' needs 'path'"),
        ("helmet", {"tasks": ["nq"], "path": "x", "length": 4000}, "length 4000: HELMET's lengths are 4096, "),
        ("jsonl", {"tasks": ["nq"], "path": "x"}, "source 'jsonl' takes no tasks; remove 'nq'"),
        ("jsonl", {"path": "x"}, "x: no such file"),
        ("embedded", {"tasks": ["needle"], "length": 384, "path": "x"}, "source 'embedded' takes no 'path'"),
    ],
)  # fmt: skip
def test_mistakes_in_a_section(source: str, keys: dict[str, Any], message: str) -> None:
    assert message in refused(choose_candidates, section(source, **keys), 0)


def test_the_embedded_model_reads_no_text() -> None:
    assert "embedded source" in refused(load_tokenizer, "kvdrift/tiny")


def test_a_tokenizer_is_loaded_without_weights(tokenizer: Any, tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "has no tokenizer" in refused(load_tokenizer, str(tmp_path))
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))("The sky")["input_ids"] == tokenizer("The sky")["input_ids"]


def test_chat_without_a_chat_template_is_said(tokenizer: Any) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    line = refused(take, section("ruler", tasks=["vt"], chat_template=True), bare)
    assert "no chat template" in line


def test_a_template_that_refuses_a_systems_message_goes_without(tokenizer: Any, helmet: Path) -> None:
    """The instruction is then part of the user's message, as in the benchmark."""
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, chat_template=strict)
    for document in everything(section("helmet", tasks=["asqa"], path=str(helmet)), other):
        text = tokenizer.decode(document.tokens)
        assert text.startswith("<user>Instruction: cite.")
        assert text.endswith("</user><assistant>")


def test_a_long_array_is_read_entry_by_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [{"number": number, "text": 'ä]}{[,"' * (number % 7)} for number in range(300)]
    path = tmp_path / "array.json"
    path.write_text(json.dumps(entries, ensure_ascii=False, indent=1), encoding="utf-8")
    monkeypatch.setattr(files, "CHUNK", 50)
    assert [row.fields for _, row in files.read_rows(path)] == entries
    assert [number for number, _ in files.read_rows(path, {3, 299})] == [3, 299]
    path.write_text(path.read_text(encoding="utf-8")[:-100], encoding="utf-8")
    with pytest.raises(InputError, match=r"array.json, entry 2[0-9]+: expected a JSON object"):
        list(files.read_rows(path))
