"""Vision-language targets: loading one with its processor, and how a prompt with images enters it.

An image stands in the stream as one placeholder token per merged patch, and takes rope positions on a grid (M-RoPE): time,
height and width axes that advance by max(h, w) where the stream advances by h * w. The prompt's positions come from the
target's own `get_rope_index`; everything after the prompt is `glance.target`'s business. Families without `get_rope_index`
(LLaVA, SmolVLM) use plain positions.

transformers loads no processor for images without torchvision (it silently returns the bare tokenizer). `load_target`
notices, and composes an image-only processor of the stock class's interface over the same files and Pillow's resizing.

Shapes: P prompt tokens, n patches before merging, (t, h, w) a grid of them.
"""

import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from glance.head import as_device, check_checkpoint, default_dtype, loading, quiet_loading
from glance.session import check_unpadded
from glance.target import StreamPositions, placeholder_id

log = logging.getLogger(__name__)
KINDS = {"image": ("pixel_values", "image_grid_thw", 1), "video": ("pixel_values_videos", "video_grid_thw", 2)}


class VisionPositions:
    """A prompt with images, and video where the family has it; holds no state, so one object serves every arm.

    Args:
        pixel_values: the processor's pixels, (n, patch) for the Qwen families; None for a prompt without images.
        image_grid_thw: (images, 3) grids in patches, where the family has grids.
        mm_token_type_ids: (1, P) 0 text, 1 image, 2 video; built from the config's placeholder ids when absent.
        video: further keywords for video: `pixel_values_videos`, `video_grid_thw`, `second_per_grid_ts`.
        extra: any further keyword of the prefill (`image_sizes`, `pixel_attention_mask`, ...).
    """

    def __init__(
        self,
        pixel_values: torch.Tensor | None,
        image_grid_thw: torch.Tensor | None = None,
        *,
        mm_token_type_ids: torch.Tensor | None = None,
        video: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ):
        self.inputs: dict[str, Any] = {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw}
        self.inputs |= {**(video or {}), **(extra or {})}
        self.inputs = {name: value for name, value in self.inputs.items() if value is not None}
        self.mm_token_type_ids = mm_token_type_ids

    @classmethod
    def from_inputs(cls, inputs: Mapping[str, Any]) -> "VisionPositions":
        """Take what a processor returned, whatever its family names it.

        Raises:
            ValueError: a padded prompt, whose padding would be decoded as text.
        """
        check_unpadded(inputs)
        known = ("pixel_values", "image_grid_thw", "mm_token_type_ids", "input_ids", "attention_mask")
        return cls(
            inputs.get("pixel_values"),
            inputs.get("image_grid_thw"),
            mm_token_type_ids=inputs.get("mm_token_type_ids"),
            extra={name: value for name, value in inputs.items() if name not in known},
        )

    def prefill_inputs(self, model: nn.Module, input_ids: torch.Tensor) -> dict[str, Any]:
        """Check pixels against placeholders; return pixels, grids and rope positions `(A, 1, P)` (or `(1, P)`).

        Raises:
            ValueError: placeholders without pixels, pixels without placeholders, or counts that differ.
        """
        self._check_counts(model, input_ids)
        inputs = {
            name: value.to(input_ids.device) if isinstance(value, torch.Tensor) else value
            for name, value in self.inputs.items()
        }
        if "token_type_ids" not in inspect.signature(model.forward).parameters:
            inputs.pop(
                "token_type_ids", None
            )  # Gemma 3 sees an image's tokens all at once by it; others make it by habit
        base = rope_owner(model)
        grids = {name: inputs[name] for _, name, _ in KINDS.values() if name in inputs}
        if base is None or not grids:
            if not inputs:
                return StreamPositions().prefill_inputs(model, input_ids)
            if base is None and "mm_token_type_ids" in inspect.signature(model.forward).parameters:
                inputs["mm_token_type_ids"] = self._token_types(model, input_ids)  # Gemma 4's as Gemma 3's above
            return {"position_ids": torch.arange(input_ids.shape[1], device=input_ids.device)[None], **inputs}
        known = {**grids, "input_ids": input_ids, "mm_token_type_ids": self._token_types(model, input_ids)}
        known |= {name: inputs[name] for name in ("second_per_grid_ts", "use_audio_in_video") if name in inputs}
        if "video_second_per_grid" in inputs:  # the name that Qwen-Omni's processors give it
            known["second_per_grids"] = inputs["video_second_per_grid"]
        if "feature_attention_mask" in inputs:  # of sound, in Qwen-Omni's thinkers
            known["audio_seqlens"] = inputs["feature_attention_mask"].sum(-1)
        accepted = inspect.signature(base.get_rope_index).parameters
        if "mm_token_type_ids" not in accepted:  # Qwen-Omni's reads the ids themselves, through a mask
            known["attention_mask"] = torch.ones_like(input_ids)
        position_ids, _ = base.get_rope_index(**{name: value for name, value in known.items() if name in accepted})
        return {"position_ids": position_ids.to(input_ids.device, torch.long), **inputs}

    def _token_types(self, model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
        """Return `(1, P)` 0 text, 1 image, 2 video: as given, and by the placeholder ids where nothing is given."""
        built = torch.zeros_like(input_ids)
        for kind, (_, _, type_id) in KINDS.items():
            placeholder = placeholder_id(model.config, kind)
            if placeholder is not None:
                built[input_ids == placeholder] = type_id
        if self.mm_token_type_ids is None:
            return built
        types = torch.as_tensor(self.mm_token_type_ids).to(built)
        if types.shape != input_ids.shape:
            raise ValueError(f"mm_token_type_ids is {tuple(types.shape)}, the prompt is {tuple(input_ids.shape)}")
        return torch.where(built > 0, torch.where(types > 0, types, built), 0)  # GLM-4V: a video on image placeholders

    def _check_counts(self, model: nn.Module, input_ids: torch.Tensor) -> None:
        types = self._token_types(model, input_ids)
        for kind, (pixels, grid, type_id) in KINDS.items():
            tokens = int((types == type_id).sum())
            told = f"the prompt has {tokens} {kind} tokens (id {placeholder_id(model.config, kind)})"
            given = self.inputs.get(pixels)
            grids = self.inputs.get(grid)
            if (given is None) != (tokens == 0):
                raise ValueError(
                    f"{told} and {0 if given is None else len(given)} rows of {pixels}: "
                    "both or neither must be there (did the processor see the image and the chat template?)"
                )
            if given is not None and grids is None and rope_owner(model) is not None:
                raise ValueError(f"{pixels} came without {grid}, which this family needs to place its {kind} tokens")
            if grids is None or given is None:
                continue
            patches = int(torch.as_tensor(grids).prod(-1).sum())
            if patches != len(given):
                raise ValueError(f"{grid} names {patches} patches, {pixels} has {len(given)} rows")
            if (wanted := count_tokens(model, grids)) != tokens:
                raise ValueError(f"{told}, {grid} asks for {wanted}")


def rope_owner(model: nn.Module) -> Any:
    """Return what computes a prompt's M-RoPE positions: the inner model, or the model itself (Qwen-Omni's thinkers)."""
    for owner in (getattr(model, "model", None), model):
        if hasattr(owner, "get_rope_index"):
            return owner
    return None


def count_tokens(model: nn.Module, grids: torch.Tensor) -> int:
    """Return the number of tokens that grids `(n, 3)` of patches take in the stream, as the family's processor counts."""
    vision = getattr(model.config, "vision_config", None)
    merge = int(getattr(vision, "spatial_merge_size", 1))
    grids = torch.as_tensor(grids)
    if model.config.model_type == "hunyuan_vl":  # a newline token ends each row, and two tokens stand around a picture
        rows = grids[:, 1] // merge
        columns = grids[:, 2] // merge
        return int((grids[:, 0] * rows * (columns + 1) + 2).sum())
    return int(grids.prod(-1).sum()) // merge**2


def load_target(
    model_id_or_folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    attn_implementation: str = "sdpa",
    device_map: Any = None,
) -> tuple[nn.Module, Any]:
    """Load a frozen target and what encodes its prompts.

    Args:
        model_id_or_folder: a transformers checkpoint, vision-language or text.
        dtype: default bfloat16 on cuda, float32 elsewhere.
        device: default cuda, mps or cpu, the first there is; ignored with `device_map`.
        attn_implementation: "sdpa" or "eager" for trees; flash attention runs chains only.
        device_map: passed to transformers, to spread a large target.

    Returns:
        (target, processor) for a vision-language target, (target, tokenizer) for a text target.

    Raises:
        ValueError: not a checkpoint, or a target that cannot be verified as a tree.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    check_checkpoint(model_id_or_folder, "target")
    quiet_loading()
    device = as_device(device)
    with loading(model_id_or_folder):
        config = AutoConfig.from_pretrained(model_id_or_folder)
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with loading(model_id_or_folder):
        target = kind.from_pretrained(
            model_id_or_folder,
            dtype=dtype or default_dtype(device),
            attn_implementation=attn_implementation,
            device_map=device_map,
        )
        processor = load_processor(model_id_or_folder, vision=sees)
    if device_map is None:
        target = target.to(device)
    return target.eval().requires_grad_(False), processor


def load_processor(model_id_or_folder: str | Path, *, vision: bool = True) -> Any:
    """Load the stock processor where transformers can build it, else an image-only one; for text, the tokenizer."""
    from transformers import AutoProcessor, AutoTokenizer
    from transformers.utils import is_torchvision_available

    if not vision:
        return AutoTokenizer.from_pretrained(model_id_or_folder)
    if is_torchvision_available():
        processor = AutoProcessor.from_pretrained(model_id_or_folder)
        if hasattr(processor, "image_processor"):
            log.info("processor: stock %s", type(processor).__name__)
            return processor
    return _image_only_processor(model_id_or_folder)


def _image_only_processor(model_id_or_folder: str | Path) -> Any:
    """Compose the stock processor's class over Pillow image processing, without its video half."""
    import transformers
    from transformers import AutoConfig, AutoTokenizer
    from transformers.image_processing_base import ImageProcessingMixin
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    model_type = AutoConfig.from_pretrained(model_id_or_folder).model_type
    tokenizer = AutoTokenizer.from_pretrained(model_id_or_folder)
    settings, _ = ImageProcessingMixin.get_image_processor_dict(model_id_or_folder)
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type, {})
    name = settings.get("image_processor_type") or names.get("torchvision") or ""
    name = name.removesuffix("Pil").removesuffix("Fast") + "Pil"
    pillow = getattr(transformers, name, None)
    stock = getattr(transformers, PROCESSOR_MAPPING_NAMES.get(model_type, ""), None)
    if not _usable(pillow) or not _usable(stock):
        raise ValueError(
            f"{model_id_or_folder}: images of a {model_type} target need torchvision (no {name} without it in "
            f"transformers {transformers.__version__}); install it, or encode the prompt yourself"
        )
    settings, _ = stock.get_processor_dict(model_id_or_folder)
    template = settings.pop("chat_template", None) or tokenizer.chat_template
    accepted = set(inspect.signature(stock.__init__).parameters) - set(stock.get_attributes())
    processor = image_only(stock)(
        image_processor=pillow.from_pretrained(model_id_or_folder),
        tokenizer=tokenizer,
        chat_template=template,
        **{name: value for name, value in settings.items() if name in accepted},
    )
    log.info("processor: image-only %s over %s (torchvision is not installed)", stock.__name__, name)
    return processor


def _usable(kind: Any) -> bool:
    """Say whether transformers has a class here: one whose packages are missing is there as a dummy that raises."""
    return kind is not None and not getattr(kind, "is_dummy", False)


def image_only(stock: type) -> type:
    """Subclass a stock processor class so that it takes no video processor; images and text behave as in the stock."""
    if "video_processor" not in inspect.signature(stock.__init__).parameters:
        return stock

    def __init__(self: Any, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **kw: Any):
        # transformers pairs positional arguments with the subprocessors that this signature names: the None for video,
        # third in the stock signatures, pairs with nothing.
        stock.__init__(self, image_processor, tokenizer, None, chat_template=chat_template, **kw)

    return type(stock.__name__, (stock,), {"__init__": __init__, "__module__": __name__})
