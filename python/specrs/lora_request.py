"""A LoRA adapter as users name it, under vLLM's names, checked at construction. Reads no file."""

from __future__ import annotations

from dataclasses import dataclass

from specrs.errors import InvalidRequestError, UnsupportedRequestError, check_int, check_text, invalid

MAX_LORA_INT_ID = 2**32 - 1


@dataclass(frozen=True)
class LoRARequest:
    """Which adapter a request is computed with.

    `lora_name`: what answers, logs and KV events call it. `lora_int_id`: from 1, one for each adapter; an engine
    refuses an id, name or path that it knows of another adapter. `lora_path`: folder or hub id of a PEFT adapter in
    safetensors. `base_model_name`: what a server's `/v1/models` says that the adapter was made for; it changes nothing.

    Raises `InvalidRequestError` naming field, value and what is allowed.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    tensorizer_config_dict: None = None

    def __post_init__(self) -> None:
        error = InvalidRequestError
        check_text(error, "lora_name", self.lora_name)
        object.__setattr__(self, "lora_int_id", check_int(error, "lora_int_id", self.lora_int_id, 1, MAX_LORA_INT_ID))
        object.__setattr__(self, "lora_path", check_text(error, "lora_path", str(self.lora_path)))
        if self.base_model_name is not None:
            check_text(error, "base_model_name", self.base_model_name, also=", or None")
        if self.tensorizer_config_dict is not None:
            reason = "not implemented; allowed: None"
            raise invalid(UnsupportedRequestError, "tensorizer_config_dict", self.tensorizer_config_dict, reason)

    @property
    def name(self) -> str:
        """`lora_name`; like what follows a name of vLLM's."""
        return self.lora_name

    @property
    def path(self) -> str:
        """`lora_path`."""
        return self.lora_path

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`."""
        return self.lora_int_id
