"""`pii`: personal data in documents is masked."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field

from puna.stages.contract import Documents, StageConfig, StageRun, stage
from puna.stages.curate.personal import find, masked
from puna.storage.schemas import table_schema

Entity = Literal["email", "iban", "card", "ssn", "ip_address", "phone"]
ALL: tuple[Entity, ...] = ("email", "iban", "card", "ssn", "ip_address", "phone")


class PiiConfig(StageConfig):
    """What is masked, and where."""

    entities: tuple[Entity, ...] = Field(ALL, description="Kinds of personal data that are masked")
    code_sources: tuple[str, ...] = Field(("code",), description="Sources of program text, where numbers are rarely personal")
    code_entities: tuple[Entity, ...] = Field(("email",), description="Kinds that are masked in those sources")


@stage(kind="documents", filters="documents")
def pii(documents: Documents, config: PiiConfig, run: StageRun) -> None:
    """Mask e-mail addresses, phone, card, bank account and social security numbers and public IP addresses.

    A masked piece becomes `<EMAIL>`, `<PHONE>`, `<CARD>`, `<IBAN>`, `<SSN>` or `<IP_ADDRESS>`; `scores` counts them per document.
    """
    run.transform(_mask, documents, config)


def _mask(documents: pa.Table, config: PiiConfig) -> dict[str, pa.Table]:
    """Masked documents of a part, and how much was masked in each."""
    texts: list[str] = []
    scores: list[dict[str, Any]] = []
    columns = (documents.column(name).to_pylist() for name in ("id", "source", "text"))
    for identity, source, text in zip(*columns, strict=True):
        spans = find(text, config.code_entities if source in config.code_sources else config.entities)
        texts.append(masked(text, spans) if spans else text)
        for entity, count in sorted(Counter(span.entity for span in spans).items()):
            scores.append({"id": identity, "name": f"masked_{entity}", "value": float(count)})
    place = documents.schema.get_field_index("text")
    kept = documents.set_column(place, documents.schema.field(place), pa.array(texts, pa.string()))
    return {"documents": kept, "scores": pa.Table.from_pylist(scores, schema=table_schema("scores").schema)}
