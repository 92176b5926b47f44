//! Reads a folder with config.json and safetensors files. Weights are read from the mapped files.

use std::{collections::HashMap, fs, path::Path, sync::Arc};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use specrs_cpu::{
    DecoderWeights, LayerWeights, Linear, Memory, Mlp, ModelShape, Part, QkNorm, Values, VariedLayer, Weights,
};

use crate::{MAX_LEN, Result};

/// Content of config.json, and the mapped files with the place of each tensor.
pub(crate) struct Checkpoint {
    config: Value,
    files: Vec<Arc<Mmap>>,
    /// File, type, first byte and bytes by name.
    tensors: HashMap<String, (usize, Dtype, usize, usize)>,
}

impl Checkpoint {
    pub(crate) fn open(folder: &Path) -> Result<Self> {
        let config: Value = serde_json::from_str(&fs::read_to_string(folder.join("config.json"))?)?;
        let (mut files, mut tensors) = (Vec::new(), HashMap::new());
        for path in fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())) {
            let path = path?;
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                // SAFETY: the file is not written while this program runs.
                let file = unsafe { Mmap::map(&fs::File::open(path)?)? };
                let (header, metadata) = SafeTensors::read_metadata(&file)?;
                for (name, info) in metadata.tensors() {
                    let (start, end) = info.data_offsets;
                    tensors.insert(name, (files.len(), info.dtype, header + 8 + start, end - start));
                }
                files.push(Arc::new(file));
            }
        }
        let family = config["architectures"][0].as_str().unwrap_or("none");
        let rope = [&config["rope_parameters"], &config["rope_scaling"]].map(|rope| &rope["rope_type"]);
        let known =
            ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"].contains(&family);
        let window = config["sliding_window"].as_u64().filter(|_| config["use_sliding_window"] != false);
        let hides = window.is_some_and(|window| (window as usize) < MAX_LEN);
        if !known || hides || rope.iter().any(|kind| !kind.is_null() && *kind != "default") {
            return Err(format!("{family} with RoPE {rope:?}, window {window:?} is not for this example").into());
        }
        Ok(Self { config, files, tensors })
    }

    fn size(&self, field: &str) -> Result<usize> {
        let value = self.config[field].as_u64().ok_or_else(|| format!("config.json: {field} is missing"))?;
        Ok(value as usize)
    }

    fn tensor(&self, name: &str) -> Result<Values> {
        let &(file, dtype, start, bytes) = self.tensors.get(name).ok_or_else(|| format!("no tensor {name}"))?;
        let (address, owner) = (&raw const self.files[file][start], Box::new(Arc::clone(&self.files[file])));
        // SAFETY: the owner keeps the file mapped, and the metadata's ranges were checked to lie within it.
        unsafe {
            match dtype {
                Dtype::BF16 => Ok(Values::Bf16(Memory::borrow(name, address.cast(), bytes / 2, owner)?)),
                Dtype::F32 => Ok(Values::F32(Memory::borrow(name, address.cast(), bytes / 4, owner)?)),
                other => Err(format!("{name} is {other:?}, not BF16 or F32").into()),
            }
        }
    }

    fn linear(&self, inputs: usize, names: &[String]) -> Result<Linear> {
        let part = |name: &String| {
            let weight = self.tensor(&format!("{name}.weight"))?;
            let bias = self.tensor(&format!("{name}.bias")).ok();
            let outputs = weight.len() / inputs;
            Ok(Part::new(weight, bias.as_ref(), outputs))
        };
        Ok(Linear::new(&names[0], inputs, names.iter().map(part).collect::<Result<_>>()?)?)
    }

    /// Returns all weights in the mapped files.
    pub(crate) fn weights(&self) -> Result<Weights> {
        let config = &self.config;
        let (hidden, heads) = (self.size("hidden_size")?, self.size("num_attention_heads")?);
        let shape = ModelShape {
            vocab_size: self.size("vocab_size")?,
            hidden_size: hidden,
            intermediate_size: self.size("intermediate_size")?,
            num_heads: heads,
            num_kv_heads: self.size("num_key_value_heads").unwrap_or(heads),
            head_dim: self.size("head_dim").unwrap_or(hidden / heads),
            rms_norm_eps: config["rms_norm_eps"].as_f64().unwrap_or(1e-6) as f32,
        };
        let layer = |i: usize| {
            let name = |part: &str| format!("model.layers.{i}.{part}");
            let norm = |part: &str| self.tensor(&name(part));
            let linear = |inputs, parts: &[&str]| {
                self.linear(inputs, &parts.iter().map(|part| name(&format!("{part}_proj"))).collect::<Vec<_>>())
            };
            Ok(LayerWeights {
                input_norm: Some(norm("input_layernorm.weight")?),
                qkv: linear(hidden, &["self_attn.q", "self_attn.k", "self_attn.v"])?,
                output_gate: false,
                state: None,
                qk_norm: norm("self_attn.q_norm.weight")
                    .ok()
                    .zip(norm("self_attn.k_norm.weight").ok())
                    .map(|(q, k)| QkNorm { q, k, whole: false }),
                sinks: None,
                o: linear(heads * shape.head_dim, &["self_attn.o"])?,
                attention_output_norm: None,
                post_attention_norm: Some(norm("post_attention_layernorm.weight")?),
                mlp: Mlp::Dense {
                    gate_up: linear(hidden, &["mlp.gate", "mlp.up"])?,
                    down: linear(shape.intermediate_size, &["mlp.down"])?,
                },
                mlp_output_norm: None,
                varied: VariedLayer::default(),
            })
        };
        let layers = (0..self.size("num_hidden_layers")?).map(layer).collect::<Result<_>>()?;
        let head = if config["tie_word_embeddings"] == true { "model.embed_tokens" } else { "lm_head" };
        let theta = [&config["rope_parameters"]["rope_theta"], &config["rope_theta"]];
        let theta = theta.iter().find_map(|theta| theta.as_f64()).unwrap_or(10_000.0);
        let frequency = |i: usize| theta.powf(-2.0 * i as f64 / shape.head_dim as f64) as f32;
        Ok(Weights::new(DecoderWeights {
            shape,
            embedding: self.tensor("model.embed_tokens.weight")?.into(),
            layers,
            final_norm: self.tensor("model.norm.weight")?,
            lm_head: self.linear(hidden, &[head.to_string()])?,
            frequencies: (0..shape.head_dim / 2).map(frequency).collect(),
        })?)
    }

    /// Ids that end a text.
    pub(crate) fn stop_ids(&self) -> Vec<i64> {
        let eos = &self.config["eos_token_id"];
        eos.as_array().cloned().unwrap_or(vec![eos.clone()]).iter().filter_map(Value::as_i64).collect()
    }
}
