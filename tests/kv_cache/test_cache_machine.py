"""Arbitrary operations on a `KVCache`, beside a dense cache per sequence that shares nothing and forgets nothing."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from cute_kernels.formats.kv import format_of
from cute_kernels.kv_cache import KVCache, OutOfPagesError
from tests.kv_cache import oracle

HEADS, DIM, LAYERS, PAGES, PAGE_SIZE, MAX_SEQ_LEN, MAX_BATCH = 2, 64, 2, 7, 16, 70, 4
FORMATS = ("bf16", ("int8_token_head", "int4_g4"), "e5m2")


class CacheMachine(RuleBasedStateMachine):
    names = Bundle("names")

    @initialize(kv_format=st.sampled_from(FORMATS), cache_layout=st.sampled_from(("NHD", "HND")))
    def make(self, kv_format, cache_layout):
        self.cache = KVCache(
            LAYERS, PAGES, PAGE_SIZE, HEADS, DIM,
            kv_format=kv_format, cache_layout=cache_layout, max_seq_len=MAX_SEQ_LEN,
        )  # fmt: skip
        self.batch = self.cache.make_batch(MAX_BATCH)
        names = (kv_format, kv_format) if isinstance(kv_format, str) else kv_format
        self.formats = [format_of(name) for name in names]
        self.dense = {}  # name -> [layer][k or v] -> tensor [tokens, HEADS, DIM] as the cache should return it
        self.random = torch.Generator().manual_seed(0)
        self.made = 0

    # -- operations ---------------------------------------------------------------------------------------------------

    @rule(target=names, num_tokens=st.integers(0, 40))
    def allocate(self, num_tokens):
        name = self.new_name()
        if not self.refuses(lambda: self.cache.allocate(name, num_tokens)):
            self.dense[name] = [[torch.zeros(0, HEADS, DIM)] * 2 for _ in range(LAYERS)]
            self.write([name], [num_tokens])
            return name
        return multiple()

    @rule(data=st.data(), counts=st.lists(st.integers(0, 20), min_size=1, max_size=MAX_BATCH))
    def extend(self, data, counts):
        chosen = self.choose(data, len(counts))
        counts = counts[: len(chosen)]
        if not self.refuses(lambda: self.cache.extend_all(chosen, counts)):
            self.write(chosen, counts)

    @rule(data=st.data())
    def decode(self, data):
        chosen = self.choose(data, MAX_BATCH)
        if not self.refuses(lambda: self.cache.extend_all(chosen)):
            self.write(chosen, [1] * len(chosen))

    @rule(target=names, parent=names)
    def fork(self, parent):
        child = self.new_name()
        self.cache.fork(parent, child)
        self.dense[child] = [list(pair) for pair in self.dense[parent]]
        return child

    @rule(name=names, keep=st.floats(0, 1))
    def truncate(self, name, keep):
        kept = int(keep * self.cache.seq_len(name))
        self.cache.truncate(name, kept)
        self.dense[name] = [[x[:kept] for x in pair] for pair in self.dense[name]]

    @rule(name=consumes(names))
    def free(self, name):
        self.cache.free(name)
        del self.dense[name]

    # -- what must hold after each ------------------------------------------------------------------------------------

    @invariant()
    def every_page_is_free_or_referred_to_as_often_as_it_counts(self):
        table = self.cache._pages
        counts = dict.fromkeys(range(PAGES), 0)
        for name in self.dense:
            pages = self.cache.page_ids(name)
            assert len(pages) == -(-self.cache.seq_len(name) // PAGE_SIZE) == len(set(pages))
            for page in pages:
                counts[page] += 1
        assert [table.references(page) for page in range(PAGES)] == list(counts.values())
        assert table.num_shared == sum(count > 1 for count in counts.values())
        assert sorted(table._free) == [page for page, count in counts.items() if not count]

    @invariant()
    def shared_pages_hold_the_same_tokens_at_the_same_place(self):
        owners = {}
        for name in self.dense:
            for number, page in enumerate(self.cache.page_ids(name)):
                other, there = owners.setdefault(page, (name, number))
                assert there == number
                begin, end = number * PAGE_SIZE, (number + 1) * PAGE_SIZE
                mine, theirs = (self.dense[n][0][0][begin:end] for n in (name, other))
                common = min(len(mine), len(theirs))
                assert torch.equal(mine[:common], theirs[:common])

    @invariant()
    def the_cache_returns_what_was_written(self):
        assert set(self.cache.seq_ids) == set(self.dense)
        for name, layers in self.dense.items():
            for layer, want in enumerate(layers):
                for found, wanted in zip(self.cache.read(layer, name, torch.float32), want, strict=True):
                    assert torch.equal(found, wanted)

    @invariant()
    def the_batch_leads_to_the_same_tokens(self):
        names = list(self.dense)[:MAX_BATCH]
        self.batch.update(names, 0)
        assert self.batch.seq_lens.tolist() == [len(self.dense[name][0][0]) for name in names]
        for row, name in enumerate(names):
            want = self.dense[name][1][1]
            table = self.batch.block_table[row]
            assert table.tolist()[len(self.cache.page_ids(name)) :] == [-1] * (
                self.batch.max_pages - -(-len(want) // 16)
            )
            pages, layout = self.cache.v_pages[1], self.cache.cache_layout
            found = oracle.gather(pages, table, len(want), self.formats[1].name, DIM, None, layout)
            assert torch.equal(found, want)

    @invariant()
    def the_report_adds_up(self):
        report = self.cache.memory_report()
        assert report.tokens == sum(len(layers[0][0]) for layers in self.dense.values())
        assert report.tokens_stored <= report.pages_used * PAGE_SIZE and report.tokens_stored <= report.tokens
        assert report.pages_free == self.cache.num_free_pages

    # -- helpers ------------------------------------------------------------------------------------------------------

    def new_name(self):
        self.made += 1
        return f"s{self.made}"

    def choose(self, data, count):
        if not self.dense:
            return []
        return data.draw(st.lists(st.sampled_from(sorted(self.dense)), max_size=count, unique=True))

    def refuses(self, change):
        """Whether a change was refused, in which case nothing may have changed."""
        before = [(name, self.cache.page_ids(name), self.cache.seq_len(name)) for name in self.dense]
        free = list(self.cache._pages._free)
        try:
            change()
        except OutOfPagesError as error:
            assert error.needed > error.free == len(free)
        except ValueError as error:
            assert "max_seq_len" in str(error)
        else:
            return False
        assert before == [(name, self.cache.page_ids(name), self.cache.seq_len(name)) for name in self.dense]
        assert free == self.cache._pages._free and set(self.cache.seq_ids) == set(self.dense)
        return True

    def write(self, names, counts):
        """Appends random tokens to every layer, as a model's step does."""
        self.batch.update(names, counts)
        for layer in range(LAYERS):
            x = torch.randn(2, sum(counts), HEADS, DIM, generator=self.random).bfloat16()
            self.cache.append(layer, self.batch, x[0], x[1])
            for operand, form in enumerate(self.formats):
                stored = form.dequantize(form.quantize(x[operand].float()), DIM, torch.float32)
                for name, piece in zip(names, stored.split(counts), strict=True):
                    held = self.dense[name][layer]
                    held[operand] = torch.cat((held[operand], piece))


class TestCacheMachine(CacheMachine.TestCase):
    settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
