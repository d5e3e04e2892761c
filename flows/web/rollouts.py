"""The answers of a training by reinforcement: the best, the worst, and those of the prompts whose rewards changed most."""

from __future__ import annotations

from fastapi.concurrency import run_in_threadpool

from puna.flows.html.markup import section
from puna.flows.web.frame import Here, artifact_link, pages
from puna.storage import PunaError

ROWS = """with rows as (
  select r.*, coalesce(p.messages::json->>'$[#-1].content', r.prompt_id) as prompt
  from (select * from rollouts where artifact = key_of('{0}')) r left join prompts p on p.id = r.prompt_id
    and p.artifact in (select input from lineage where artifact = key_of('{0}') and name = 'prompts'))
"""
RANKED = """select step, prompt, text as answer, turns, score, verifier, reward_model, advantage, logprob, reference_logprob from rows
order by score {}, step, prompt_id, sample limit 20"""
CHANGED = """select prompt, min(step) as first, max(step) as last,
  avg(score) filter (step = low) as early, avg(score) filter (step = high) as late, late - early as change,
  arg_max(text, score) filter (step = low) as best_early, arg_max(text, score) filter (step = high) as best_late
from (select *, min(step) over same as low, max(step) over same as high from rows window same as (partition by prompt_id))
group by prompt_id, prompt having early != late order by abs(change) desc, prompt_id limit 20"""
PARTS = {"best": RANKED.format("desc"), "worst": RANKED.format("asc"), "changed": CHANGED}
"""Sections of the page, and the statements whose results they show."""
router = pages()


@router.get("/rollouts/{key}")
async def rollouts_page(site: Here, key: str) -> str:
    """Return the page of a model's rollouts."""
    model = site.store.resolve(f"model/{key}")
    if "rollouts" not in model.tables:
        raise PunaError(f"{model.id} has no table rollouts: only ppo and grpo write one")
    before = ROWS.format(model.key)
    answers = [(name, await run_in_threadpool(site.asker.ask, "sql", q=before + query)) for name, query in PARTS.items()]
    about = "Best and worst are by reward. Changed: by the mean reward of a prompt's answers in its first and its last rollout."
    return site.page(
        "Rollouts", [section(name, name.capitalize(), None, answer) for name, answer in answers],
        here="artifacts", lead=[artifact_link(model), f": {model.rows('rollouts'):,} answers. ", about],
    )  # fmt: skip
