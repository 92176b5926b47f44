//! Weights as plain numbers, and as the crate stores them: quantized, or with an adapter.

use specrs_cpu::{Bf16, Packed, Values, Weight, quantize};
use std::sync::Arc;

/// Weight `[outputs, inputs]` with a bias, in numbers that its type holds exactly.
#[derive(Clone)]
pub struct Dense {
    pub weight: Vec<f32>,
    pub bias: Option<Vec<f32>>,
    pub inputs: usize,
    pub stored: Option<Stored>,
    pub added: Option<LowRank>,
}

/// The matrices of a `LoRA` adapter for one projection: `a` is `[rank, inputs]`, `b` is `[outputs, rank]`.
#[derive(Clone)]
pub struct LowRank {
    pub a: Vec<f32>,
    pub b: Vec<f32>,
    pub rank: usize,
}

/// Integers `[outputs, inputs]` and their scales `[outputs, groups]`.
#[derive(Clone, Debug)]
pub struct Stored {
    pub values: Vec<i16>,
    pub scales: Vec<f32>,
    pub inputs: usize,
}

impl Stored {
    /// Quantizes `[outputs, inputs]` by groups of `group`.
    pub fn new(weight: &Values, inputs: usize, code_bits: u32, group: usize, threads: usize) -> Self {
        let len = weight.len();
        let (mut codes, mut scales) = (vec![99; len], vec![Bf16(0x7FFF); len / group]);
        let largest = if code_bits == 8 { 127 } else { 7 };
        quantize("test", weight, inputs, largest, &mut codes, &mut scales, threads).unwrap();
        let scales = scales.iter().map(|scale| scale.to_f32()).collect();
        Self { values: codes.into_iter().map(i16::from).collect(), scales, inputs }
    }

    /// Returns each weight's integer and scale.
    pub fn codes(&self) -> Vec<(i32, f32)> {
        let group = self.values.len() / self.scales.len();
        self.values.iter().enumerate().map(|(i, &q)| (i32::from(q), self.scales[i / group])).collect()
    }

    /// Returns the weight in the crate's type.
    pub fn weight(&self) -> Weight {
        Weight::Packed(Arc::new(Packed::grouped("test", &self.values, self.inputs, &self.scales, 2).unwrap()))
    }

    /// Stacks several weights by outputs.
    pub fn join(parts: Vec<Self>) -> Self {
        parts
            .into_iter()
            .reduce(|a, b| Self {
                values: [a.values, b.values].concat(),
                scales: [a.scales, b.scales].concat(),
                inputs: a.inputs,
            })
            .unwrap()
    }
}

/// Returns the largest group of INT4 weights that divides the inputs.
pub fn group_of(inputs: usize) -> usize {
    [128, 64, 32].into_iter().find(|&group| inputs.is_multiple_of(group)).expect("a multiple of 32 inputs")
}
