"""The scheduler loses and leaks no page, for any sequence of requests, forks, ends, cancellations, pauses and reused prefixes."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from puna.kernels.paged_attention import PAGE
from puna.models.generation.pages import PagePool
from puna.models.generation.sampling_params import SamplingParams
from puna.models.generation.schedule import Request, Scheduler
from puna.models.generation.sinks import Kept


class Pages(RuleBasedStateMachine):
    """The scheduler without a model: each page records the tokens written to it, and the position by which each key is rotated."""

    @initialize(count=st.integers(7, 30), sequences=st.integers(1, 6), step_tokens=st.integers(1, 60), kept=st.sampled_from([None, None, Kept(16, 16), Kept(0, 32), Kept(16, 32)]))
    def begin(self, count, sequences, step_tokens, kept):
        self.scheduler = Scheduler(PagePool(count), sequences, step_tokens, kept=kept)
        self.held, self.turned = np.full((count, PAGE), -1), np.zeros((count, PAGE), int)
        self.asked, self.cancelled, self.finished = [], set(), 0

    @rule(length=st.integers(1, 70), n=st.integers(1, 4), new=st.integers(1, 40), branch=st.integers(0, 3), ahead=st.integers(0, 9), priority=st.integers(0, 1))
    def ask(self, length, n, new, branch, ahead, priority):
        """Submit prompts that share some first pages."""
        prompt = [token if token < 20 else 100 * branch + token for token in range(length)]
        params = SamplingParams(n=n, max_tokens=new, stop=(), speculate=ahead, priority=priority)
        request = Request(prompt, params, frozenset(), (), ())
        try:
            self.scheduler.add(request)
        except ValueError:
            assert -(-(length + new) // PAGE) + 1 > len(self.held)  # an answer's pages, and one for a copy
        else:
            self.asked.append(request)

    @rule(token=st.integers(0, 1), ends=st.integers(0, 7), right=st.integers(0, 9))
    def step(self, token, ends, right=0):
        """Compute the due tokens, start and draw what is possible, with some guesses accepted; one in eight answers ends by itself."""
        work = self.scheduler.plan()
        for source, target in self.scheduler.copies:
            self.held[target], self.turned[target] = self.held[source], self.turned[source]
        for pages in self.scheduler.turns.values():  # pages that only this answer uses
            assert all(self.scheduler.pool.references[page] == 1 and page not in self.scheduler.pool.nodes for page in pages)
            self.turned[pages] -= self.scheduler.kept.step
        self.scheduler.copies, self.scheduler.turns = [], {}
        for answer in work:
            for place, written in enumerate([*answer.tokens[answer.computed : answer.computed + answer.count], *answer.guess], answer.place):
                page = answer.pages[place // PAGE]
                assert place % PAGE == 0 or self.scheduler.pool.references[page] == 1  # no other answer refers to a written page
                self.held[page, place % PAGE], self.turned[page, place % PAGE] = written, place
            self.scheduler.mark_computed(answer, object())
        for number, answer in enumerate([answer for answer in work if answer.hidden is not None] + list(self.scheduler.fork())):
            held = answer.guess[:right]
            answer.hidden, answer.guess = None, []
            answer.computed += len(held)
            answer.tokens += [*held, 1000 + (token + number) % 2]  # two possible tokens, so that several tokens have followed the same context
            answer.logprobs += [0.0] * (len(held) + 1)
            assert len(answer.logprobs) <= answer.request.params.max_tokens
            if len(answer.logprobs) == answer.request.params.max_tokens or ends == number:
                self.scheduler.finish(answer)
                self.finished += 1

    @rule(number=st.integers(0, 99))
    def cancel(self, number):
        if self.asked:
            self.cancelled.add(self.asked[number % len(self.asked)])
            self.scheduler.cancel(self.asked[number % len(self.asked)])

    @rule()
    def change_weights(self):
        self.scheduler.restart()
        self.held[:] = -1

    @invariant()
    def every_page_is_accounted_for(self):
        if not hasattr(self, "scheduler"):
            return
        pool = self.scheduler.pool
        expected = [0] * len(pool.references)
        for answer in self.scheduler.running:
            for page in answer.pages:
                expected[page] += 1
        for request in self.asked:
            for page in request.trunk[0] if request.trunk else ():
                expected[page] += 1
        in_tree = set(pool.nodes)
        for page in in_tree:
            expected[page] += 1
        assert pool.references == expected
        assert sorted(pool.free) == [page for page, count in enumerate(expected) if count == 0]
        assert set(pool.spare) == {page for page in in_tree if expected[page] == 1}
        assert len(self.scheduler.running) <= self.scheduler.sequences
        assert not any(answer.pages for answer in self.scheduler.paused)

    @invariant()
    def every_page_holds_its_tokens(self):
        if not hasattr(self, "scheduler"):
            return
        pending, kept = {target for _, target in self.scheduler.copies}, self.scheduler.kept
        for answer in self.scheduler.running:
            assert kept is None or answer.place <= kept.room
            for place in range(answer.place):
                page, number = answer.pages[place // PAGE], place if kept is None or place < kept.sinks else place + answer.fallen
                assert page in pending or self.held[page, place % PAGE] == answer.tokens[number]
                assert page in pending or self.turned[page, place % PAGE] == place
        nodes = self.scheduler.pool.nodes
        for page, (before, tokens) in nodes.items():
            assert tuple(self.held[page]) == tokens and (before == -1 or before in nodes)
            assert self.turned[page, 0] == (0 if before == -1 else self.turned[before, 0] + PAGE)

    def teardown(self):
        """Check that every request is answered unless it was cancelled, and that all pages are then available."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            if self.scheduler.idle:
                break
            self.step(0, 7)
        assert self.scheduler.idle
        assert self.scheduler.pool.available == len(self.scheduler.pool.references)
        wanted = sum(request.params.n for request in self.asked if request not in self.cancelled)
        assert self.finished >= wanted


Pages.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestPages = Pages.TestCase
