"""A LoRA adapter that a request names, under vLLM's field names, checked at construction. Reads no file."""

from __future__ import annotations

from dataclasses import dataclass

from specrs.errors import InvalidRequestError, UnsupportedRequestError, check_int, check_text, invalid

MAX_LORA_INT_ID = 2**32 - 1


@dataclass(frozen=True)
class LoRARequest:
    """LoRA adapter that a request is computed with.

    `lora_name`: its name in answers, logs and KV events. `lora_int_id`: number from 1 on, a different one for each
    adapter. An engine rejects a request whose id, name or path contradicts an adapter that it knows. `lora_path`:
    folder or hub id of a PEFT adapter in safetensors. `base_model_name`: model that the adapter was made for, as shown
    by a server's `/v1/models`; it has no other effect.

    Raises `InvalidRequestError` for a wrong value, with field, value and what is allowed.
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
        """Name of the adapter; vLLM's name for `lora_name`."""
        return self.lora_name

    @property
    def path(self) -> str:
        """Folder or hub id of the adapter; vLLM's name for `lora_path`."""
        return self.lora_path

    @property
    def adapter_id(self) -> int:
        """Number of the adapter; vLLM's name for `lora_int_id`."""
        return self.lora_int_id
