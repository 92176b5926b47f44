//! Weights as plain numbers, and as the crate stores them: codes with scales, what an adapter adds.

use super::Numbers;
use specrs_cpu::{Bf16, Memory, Values, Weight, quantize_int4, quantize_int8};

/// A weight `[outputs, inputs]` with a bias, as numbers that its type holds exactly.
#[derive(Clone)]
pub struct Dense {
    pub weight: Vec<f32>,
    pub bias: Option<Vec<f32>>,
    pub inputs: usize,
    pub stored: Option<Stored>,
    pub added: Option<LowRank>,
}

/// `[rank, inputs]` and `[outputs, rank]`, what an adapter adds.
#[derive(Clone)]
pub struct LowRank {
    pub a: Vec<f32>,
    pub b: Vec<f32>,
    pub rank: usize,
}

/// Scales as the crate stores them.
#[derive(Clone, Debug)]
pub enum Scales {
    F32(Vec<f32>),
    Bf16(Vec<Bf16>),
}

impl Scales {
    fn len(&self) -> usize {
        match self {
            Self::F32(all) => all.len(),
            Self::Bf16(all) => all.len(),
        }
    }

    fn get(&self, i: usize) -> f32 {
        match self {
            Self::F32(all) => all[i],
            Self::Bf16(all) => all[i].to_f32(),
        }
    }

    fn values(&self) -> Values {
        match self {
            Self::F32(all) => Values::F32(Memory::from_vec(all.clone())),
            Self::Bf16(all) => Values::Bf16(Memory::from_vec(all.clone())),
        }
    }

    fn join(self, other: Self) -> Self {
        match (self, other) {
            (Self::F32(a), Self::F32(b)) => Self::F32([a, b].concat()),
            (Self::Bf16(a), Self::Bf16(b)) => Self::Bf16([a, b].concat()),
            _ => panic!("of one kind"),
        }
    }
}

/// Codes and scales as the crate stores them.
#[derive(Clone, Debug)]
pub enum Stored {
    Int8(Vec<i8>, Scales),
    Int4(Vec<u8>, Scales),
}

impl Stored {
    /// Quantizes `[outputs, inputs]`; INT4 by groups of `group`.
    pub fn new(weight: &Values, inputs: usize, code_bits: u32, group: usize, threads: usize) -> Self {
        let len = weight.len();
        if code_bits == 8 {
            let (mut codes, mut scales) = (vec![99; len], vec![Bf16(0x7FFF); len / inputs]);
            quantize_int8("test", weight, inputs, &mut codes, &mut scales, threads).unwrap();
            return Self::Int8(codes, Scales::Bf16(scales));
        }
        let (mut codes, mut scales) = (vec![99; len / 2], vec![Bf16(0x7FFF); len / group]);
        quantize_int4("test", weight, inputs, &mut codes, &mut scales, threads).unwrap();
        Self::Int4(codes, Scales::Bf16(scales))
    }

    /// Any codes, with scales of fp32 or bf16, some of them negative, for groups of `group`.
    pub fn draw(n: &mut Numbers, outputs: usize, inputs: usize, code_bits: u32, group: usize, bf16: bool) -> Self {
        let scales: Vec<f32> = (0..outputs * inputs / group).map(|_| n.unit() * 0.1).collect();
        let scales =
            if bf16 { Scales::Bf16(scales.iter().map(|&x| Bf16::from_f32(x)).collect()) } else { Scales::F32(scales) };
        let mut byte = || n.below(256) as u8;
        match code_bits {
            8 => Self::Int8((0..outputs * inputs).map(|_| byte() as i8).collect(), scales),
            _ => Self::Int4((0..outputs * inputs / 2).map(|_| byte()).collect(), scales),
        }
    }

    /// By output of `inputs`: each weight's code and its scale.
    pub fn codes(&self, inputs: usize) -> Vec<(i32, f32)> {
        match self {
            Self::Int8(codes, scales) => {
                let group = codes.len() / scales.len();
                debug_assert!(inputs.is_multiple_of(group));
                codes.iter().enumerate().map(|(i, &q)| (i32::from(q), scales.get(i / group))).collect()
            }
            Self::Int4(codes, scales) => {
                let group = 2 * codes.len() / scales.len();
                let code = |i: usize| {
                    let byte = i32::from(codes[i / 32 * 16 + i % 16]);
                    if i % 32 < 16 { byte % 16 - 8 } else { byte / 16 - 8 }
                };
                (0..2 * codes.len()).map(|i| (code(i), scales.get(i / group))).collect()
            }
        }
    }

    /// The same for the crate.
    pub fn weight(&self) -> Weight {
        match self {
            Self::Int8(codes, scales) => {
                Weight::Int8 { codes: Memory::from_vec(codes.clone()), scales: scales.values() }
            }
            Self::Int4(codes, scales) => {
                Weight::Int4 { codes: Memory::from_vec(codes.clone()), scales: scales.values() }
            }
        }
    }

    /// Several above each other.
    pub fn join(parts: Vec<Self>) -> Self {
        parts
            .into_iter()
            .reduce(|a, b| match (a, b) {
                (Self::Int8(a, s), Self::Int8(b, t)) => Self::Int8([a, b].concat(), s.join(t)),
                (Self::Int4(a, s), Self::Int4(b, t)) => Self::Int4([a, b].concat(), s.join(t)),
                _ => panic!("of one kind"),
            })
            .unwrap()
    }
}

/// The largest group of INT4 weights that divides the inputs.
pub fn group_of(inputs: usize) -> usize {
    [128, 64, 32].into_iter().find(|&group| inputs.is_multiple_of(group)).expect("a multiple of 32 inputs")
}
