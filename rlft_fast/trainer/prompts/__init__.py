"""Prompts: rows of data, conversations as the model reads them, and their tokens."""

from rlft_fast.trainer.prompts.chat import (
    MARK,
    RESULT_MARK,
    Conversation,
    Tokenizer,
    conversation_of,
    reads,
    tools_of,
    without_nulls,
)
from rlft_fast.trainer.prompts.formats import Row, read_data
from rlft_fast.trainer.prompts.images import (
    COLUMNS,
    ImageError,
    ImageReader,
    ImageSource,
    PromptImages,
    folder_of,
    image_parts,
    only_placeholders,
    read_picture,
    row_images,
)
from rlft_fast.trainer.prompts.limits import Limits
from rlft_fast.trainer.prompts.loading import (
    Prompts,
    checksum,
    find_media,
    find_media_column,
    load_prompts,
    name_rows,
)
from rlft_fast.trainer.prompts.messages import (
    Message,
    are_written,
    find_mistake,
    is_plain,
    render,
    with_words,
    words_of,
)
from rlft_fast.trainer.prompts.rows import LeftOut, Overlong, RowSet, Stream, overlong_notes, read_sets
from rlft_fast.trainer.prompts.runs import load_data, load_held_out, load_training
from rlft_fast.trainer.prompts.streaming import StreamError, stream_prompts
from rlft_fast.trainer.prompts.tokens import Encoding, encode_rows, start_of_texts

__all__ = [
    "COLUMNS",
    "MARK",
    "RESULT_MARK",
    "Conversation",
    "Encoding",
    "ImageError",
    "ImageReader",
    "ImageSource",
    "LeftOut",
    "Limits",
    "Message",
    "Overlong",
    "PromptImages",
    "Prompts",
    "Row",
    "RowSet",
    "Stream",
    "StreamError",
    "Tokenizer",
    "are_written",
    "checksum",
    "conversation_of",
    "encode_rows",
    "find_media",
    "find_media_column",
    "find_mistake",
    "folder_of",
    "image_parts",
    "is_plain",
    "load_data",
    "load_held_out",
    "load_prompts",
    "load_training",
    "name_rows",
    "only_placeholders",
    "overlong_notes",
    "read_data",
    "read_picture",
    "read_sets",
    "reads",
    "render",
    "row_images",
    "start_of_texts",
    "stream_prompts",
    "tools_of",
    "with_words",
    "without_nulls",
    "words_of",
]
