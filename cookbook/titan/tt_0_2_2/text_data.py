"""Train and validate on texts: the user's own with `--training.dataset=text --data.files=...`.

TorchTitan 0.2.2 streams C4 and loses its position when it resumes in a second epoch. Here, a few
numbers per source store the position, and the seed determines the order of each epoch. A resumed
job thus reads exactly the batches that an uninterrupted job would read.

TorchTitan does not validate DeepSeek-V3. For other models its validator reads different batches
each time, and counts their tokens as training throughput. The validator here reads the same batches
each time and does not count their tokens; `routing.py` keeps them out of router counts.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from datasets import Dataset
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset, get_worker_info
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.hf_datasets import text_datasets
from torchtitan.tools.logging import logger

from cookbook.base.errors import InputError
from cookbook.base.text_files import Document, TextSource, find_sources, windows
from cookbook.titan.common.process import die_with_parent
from cookbook.titan.tt_0_2_2.versions import refuse

DATASET = "text"


@dataclass
class Place:
    """One reader's position in one source; a reader is a data-loader worker of one rank."""

    epoch: int = 0
    file: int = 0  # index of the current file, or shard, in this epoch's order
    before: int = 0  # number of documents in this epoch's earlier files
    documents: int = 0  # position in the current file, counting other readers' documents too
    tokens: int = 0  # tokens that this reader has returned over all epochs


def read_texts(
    source: TextSource, seed: int, rank: int, readers: int, place: Place
) -> Iterator[str]:
    """Yield every `readers`-th text of a source, for reader `rank`, epoch by epoch from `place` on.

    Yielding a text advances `place`. A new call with a copy of `place` resumes at the next text.
    """

    def shuffle(items: list[Any], name: str) -> None:
        if seed >= 0:
            random.Random(f"{seed} {place.epoch} {name}").shuffle(items)

    def documents(number: int) -> Iterator[Document]:
        for count, window in enumerate(windows(parts[number]())):
            shuffle(window, f"{number}-{count}")
            yield from window

    parts = source.parts()
    # Every reader reads every file, and leaves the others' documents out. Streams would be
    # downloaded once a reader, so each reader gets shards of its own if there are enough.
    owns_parts = source.hub is not None and len(parts) >= readers
    first, stride = (0, 1) if owns_parts else (rank, readers)
    if source.hub is not None and not owns_parts:
        words = "%s has %d shards: each of its %d readers downloads all of them"
        logger.warning(words, source.pattern, len(parts), readers)
    while True:
        order = list(range(len(parts)))
        shuffle(order, "files")
        if owns_parts:
            order = order[rank::readers]
        for number in order[place.file :]:
            for document in islice(documents(number), place.documents, None):
                count = place.before + place.documents
                place.documents += 1
                if count % stride == first:
                    yield document.text()
            place.before, place.documents = place.before + place.documents, 0
            place.file += 1
        if place.before <= first:
            raise source.too_few(place.before, readers)
        place.epoch, place.file, place.before = place.epoch + 1, 0, 0


@dataclass(eq=False)
class TextDataset(IterableDataset, Stateful):
    """Token sequences from weighted sources, split over ranks and data-loader workers.

    Yields `{"input": tokens}, labels`, each (seq_len,) int64, as TorchTitan's dataset does.
    """

    sources: Sequence[TextSource]
    seed: int
    tokenizer: Any
    seq_len: int
    dp_rank: int
    dp_world_size: int

    def __post_init__(self) -> None:
        self._buffer: list[int] = []
        self._places = [Place() for _ in self.sources]

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        rank, readers = self.dp_rank * workers + number, self.dp_world_size * workers
        pairs = [*zip(self.sources, self._places, strict=True)]
        streams = [read_texts(source, self.seed, rank, readers, place) for source, place in pairs]
        while True:
            # Read from the source that is furthest behind its share of the tokens.
            shares = [place.tokens / source.weight for source, place in pairs]
            behind = shares.index(min(shares))
            try:
                text = next(streams[behind])
            except InputError as error:
                raise refuse(str(error)) from None
            tokens = self.tokenizer.encode(text, add_bos=True, add_eos=True)
            self._places[behind].tokens += len(tokens)
            self._buffer.extend(tokens)
            while len(self._buffer) > self.seq_len:
                x = torch.tensor(self._buffer[: self.seq_len + 1], dtype=torch.int64)
                del self._buffer[: self.seq_len + 1]
                yield {"input": x[:-1]}, x[1:]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in every source and the tokens left over for the next sequence."""
        return {
            "places": [asdict(place) for place in self._places],
            "buffer": packed(self._buffer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position; `resume_point.py` refuses other texts or another order."""
        self._places = [Place(**place) for place in state["places"]]
        self._buffer = unpacked(state["buffer"])


def packed(tokens: list[int]) -> np.ndarray[Any, Any]:
    """Return a copy of `tokens` that a process sends fast: with every batch its state is sent.

    Of a list of 400,000 numbers, what is left of a long document, the training would wait some
    10 ms for each batch. The copy is also what the thread that sends needs: its reader reads on.
    """
    return np.array(tokens, dtype=np.int32)


def unpacked(tokens: Any) -> list[int]:
    """Return the tokens of `packed`, or of a checkpoint that has them as a list."""
    return np.asarray(tokens, dtype=np.int32).tolist()


class SharedTextDataset(text_datasets.HuggingFaceTextDataset):
    """TorchTitan's data set, of which each data-loader worker reads its own part.

    TorchTitan's workers would all read the whole part of their rank, so that it is trained on once
    a worker. `datasets` itself deals streamed data sets to the workers.
    """

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "token_buffer": packed(self._token_buffer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state | {"token_buffer": unpacked(state["token_buffer"])})

    def _get_data_iter(self) -> Iterator[Any]:
        worker, data = get_worker_info(), self._data
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        is_streamed = not isinstance(data, Dataset)
        if (found := data.num_shards if is_streamed else len(data)) < workers:
            # A worker without texts would look for them without end.
            kind = "shards" if is_streamed else "documents"
            words = f"each rank has {found} {kind} for its {workers} reading processes"
            raise refuse(f"{self.dataset_name}: {words}; use fewer ranks or workers, or more texts")
        if is_streamed:
            return iter(data)
        own = data.shard(workers, number)
        return iter(own.skip(min(self._sample_idx, len(own))))


def build_dataloader(validates: bool = False, **arguments: Any) -> ParallelAwareDataloader:
    """Return the loader of a job's training texts or, if `validates`, of its validation texts."""
    config = arguments["job_config"]
    section = config.validation if validates else config.training
    ranks = arguments["dp_rank"], arguments["dp_world_size"]
    dataset: IterableDataset[Any]
    if section.dataset == DATASET:
        data = config.data
        files = data.validation_files if validates else data.files
        try:
            sources = find_sources(files, data.text_key)
        except InputError as error:
            raise refuse(str(error)) from None
        tokenizer = arguments["tokenizer"]
        dataset = TextDataset(sources, data.shuffle_seed, tokenizer, section.seq_len, *ranks)
    else:
        name, path, tokenizer = section.dataset, section.dataset_path, arguments["tokenizer"]
        try:
            dataset = SharedTextDataset(name, path, tokenizer, section.seq_len, *ranks, True)
        except IndexError:
            found = f"{path or name} has fewer documents than the {ranks[1]} data-parallel ranks"
            raise refuse(f"{found}; use fewer of them, or more documents") from None
    options = {**asdict(section.dataloader), "batch_size": section.local_batch_size}
    loader = ParallelAwareDataloader(dataset, *ranks, **options)
    # Workers must die with their rank. One that survived would block forever: it writes its state,
    # which can exceed the pipe's buffer, into a pipe that nobody reads any more.
    loader.worker_init_fn = die_with_parent
    return loader


class RepeatableValidator(Validator):
    """TorchTitan's validator, on the first `validation.steps` batches of the validation texts.

    Its batches have the training shape, so nothing is compiled or allocated for a second shape.
    """

    def __init__(self, job_config: Any, dp_world_size: int, dp_rank: int, **parts: Any) -> None:
        # Skip Validator.__init__, which builds a loader of TorchTitan's own data sets.
        BaseValidator.__init__(self, job_config)
        training, validation = job_config.training, job_config.validation
        validation.seq_len = training.seq_len
        validation.local_batch_size = training.local_batch_size
        self.__dict__.update(parts)
        self._place = {"dp_world_size": dp_world_size, "dp_rank": dp_rank}

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Log the validation loss, the mean over tokens, on the rank that has the loss."""
        processor: Any = self.metrics_processor
        if processor.alarm:
            processor.alarm.pause()
        tokens, last_log = processor.ntokens_since_last_log, processor.time_last_log
        began = time.perf_counter()
        processor.ntokens_since_last_log, processor.time_last_log = 0, began
        self.validation_dataloader = build_dataloader(
            validates=True, job_config=self.job_config, tokenizer=self.tokenizer, **self._place
        )
        super().validate(model_parts, step)
        processor.ntokens_since_last_log = tokens
        processor.time_last_log = last_log + time.perf_counter() - began
