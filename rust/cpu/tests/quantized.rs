//! INT8 and INT4 weights: what quantizing costs at most, and that their products are those of the numbers they stand for.

mod support;

use proptest::prelude::*;
use specrs_cpu::{
    Bf16, Decoder, Isa, Linear, Memory, ModelShape, Part, Pool, Values, Weight, Weights, quantize_int4, quantize_int8,
};
use std::sync::Arc;
use support::{Host, Kind, LLAMA_BIAS, LLAMA3, Model, Numbers, QWEN3, SMALL, Stored};

/// No layers: what it computes is the product with its head.
fn head(isa: Isa, threads: usize, inputs: usize, outputs: usize, weight: impl Into<Weight>) -> Decoder {
    let shape = ModelShape { hidden_size: inputs, vocab_size: outputs, ..SMALL };
    let zeros = |len| Values::F32(Memory::from_vec(vec![0.0; len]));
    let head = Linear::new("head", inputs, vec![Part::new(weight, None, outputs)]).unwrap();
    let weights =
        Weights::new(shape, zeros(outputs * inputs), vec![], &zeros(inputs), head, vec![1.0; SMALL.head_dim / 2]);
    Decoder::with_isa(Arc::new(weights.unwrap()), Arc::new(Pool::new(threads).unwrap()), isa)
}

/// Weights whose groups differ by powers of two, some of them nothing but zeros, bf16 or not.
fn draw(n: &mut Numbers, len: usize, bf16: bool) -> Vec<f32> {
    let mut size = 1.0;
    let mut number = |i: usize| {
        if i.is_multiple_of(32) {
            size = if n.below(8) == 0 { 0.0 } else { 2_f32.powi(n.below(60) as i32 - 30) };
        }
        let x = size * n.unit();
        if bf16 { Bf16::from_f32(x).to_f32() } else { x }
    };
    (0..len).map(&mut number).collect()
}

fn values(weight: &[f32], bf16: bool) -> Values {
    if bf16 {
        Values::Bf16(Memory::from_vec(weight.iter().map(|&x| Bf16::from_f32(x)).collect()))
    } else {
        Values::F32(Memory::from_vec(weight.to_vec()))
    }
}

/// The portable products of rows of `x` with the fp32 numbers of the codes, to whose bits those of the codes are held on every instruction set.
fn products_of_numbers(
    stored: &Stored,
    x: &[f32],
    (inputs, outputs): (usize, usize),
    threads: usize,
) -> Result<Vec<f32>, TestCaseError> {
    let numbers: Vec<f32> = stored.codes(inputs).iter().map(|&(q, s)| q as f32 * s).collect();
    let mut expected = vec![f32::NAN; x.len() / inputs * outputs];
    head(Isa::by_name("portable").unwrap(), 1, inputs, outputs, values(&numbers, false))
        .logits(x, outputs, &mut expected)
        .unwrap();
    for isa in Isa::available() {
        let mut y = vec![f32::NAN; expected.len()];
        head(isa, threads, inputs, outputs, stored.weight()).logits(x, outputs, &mut y).unwrap();
        for (y, expected) in y.iter().zip(&expected) {
            prop_assert_eq!(y.to_bits(), expected.to_bits(), "{} for {} on {}", y, expected, isa.name());
        }
    }
    Ok(expected)
}

/// Which codes, how many inputs, and inputs of a group.
fn kinds() -> impl Strategy<Value = (u32, usize, usize)> {
    let int8 = (1..300_usize).prop_map(|inputs| (8, inputs, inputs));
    let int4 = (prop::sample::select(vec![32, 64, 96, 128]), 1..5_usize)
        .prop_map(|(group, groups)| (4, group * groups, group));
    prop_oneof![int8, int4]
}

/// The same, INT8 by groups too.
fn groups() -> impl Strategy<Value = (u32, usize, usize)> {
    let int8 = (prop::sample::select(vec![16, 32, 48, 128]), 1..5_usize)
        .prop_map(|(group, groups)| (8, group * groups, group));
    prop_oneof![kinds(), int8]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every weight is off by at most half its scale, and some code of a group is as large as can be.
    #[test]
    fn weights_are_the_nearest_codes(
        (code_bits, inputs, group) in kinds(),
        outputs in 1..9_usize,
        bf16 in any::<bool>(),
        threads in 1..5_usize,
        seed in any::<u64>(),
    ) {
        let weight = draw(&mut Numbers(seed), outputs * inputs, bf16);
        let values = values(&weight, bf16);
        let stored = Stored::new(&values, inputs, code_bits, group, threads);
        let codes = stored.codes(inputs);
        let largest = if code_bits == 8 { 127 } else { 7 };
        for (w, codes) in weight.chunks(group).zip(codes.chunks(group)) {
            let scale = codes[0].1;
            for (&w, &(q, s)) in w.iter().zip(codes) {
                prop_assert_eq!(s.to_bits(), scale.to_bits());
                prop_assert!(q.abs() <= largest);
                let number = f64::from(q) * f64::from(s);
                prop_assert_eq!(f64::from(q as f32 * s).to_bits(), number.to_bits(), "exact in fp32");
                prop_assert!((f64::from(w) - number).abs() <= f64::from(s) / 2.0, "{w} {q} {s}");
            }
            let amax = w.iter().fold(0.0_f32, |amax, w| amax.max(w.abs()));
            prop_assert!(scale <= amax / largest as f32 * (1.0 + 1.0 / 128.0), "{scale} for {amax}");
        }
    }

    /// To the bit those of the fp32 numbers, and so exact within their length (`limits.rs`); off from those of the weights
    /// before by at most the sum of |x| scale / 2 besides. On every instruction set, for any rows and threads.
    #[test]
    fn products_are_those_of_the_numbers(
        (code_bits, inputs, group) in kinds(),
        outputs in 1..40_usize,
        rows in 1..20_usize,
        threads in 1..4_usize,
        seed in any::<u64>(),
    ) {
        let n = &mut Numbers(seed);
        let weight = draw(n, outputs * inputs, false);
        let stored = Stored::new(&values(&weight, false), inputs, code_bits, group, 2);
        let codes = stored.codes(inputs);
        let x: Vec<f32> = (0..rows * inputs).map(|_| n.unit()).collect();
        let expected = products_of_numbers(&stored, &x, (inputs, outputs), threads)?;
        for (i, y) in expected.iter().enumerate() {
            let (output, x) = (i % outputs * inputs, &x[i / outputs * inputs..][..inputs]);
            let (mut exact, mut before, mut size, mut bound) = (0.0, 0.0, 0.0, 0.0);
            for (j, &x) in x.iter().enumerate() {
                let (x, (q, s)) = (f64::from(x), codes[output + j]);
                let product = f64::from(q) * f64::from(s) * x;
                exact += product;
                size += product.abs();
                before += f64::from(weight[output + j]) * x;
                bound += x.abs() * f64::from(s) / 2.0;
            }
            let rounding = 2_f64.powi(-24) * (inputs.div_ceil(16) + 6) as f64 * size;
            prop_assert!((f64::from(*y) - exact).abs() <= rounding);
            prop_assert!((f64::from(*y) - before).abs() <= rounding + bound * (1.0 + 1e-12));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Codes and scales of others, all codes that there are, INT8 by groups too: to the bit the products of the numbers.
    #[test]
    fn products_of_any_groups(
        (code_bits, inputs, group) in groups(),
        outputs in 1..40_usize,
        rows in 1..20_usize,
        threads in 1..4_usize,
        bf16 in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let n = &mut Numbers(seed);
        let stored = Stored::draw(n, outputs, inputs, code_bits, group, bf16);
        let x: Vec<f32> = (0..rows * inputs).map(|_| n.unit()).collect();
        products_of_numbers(&stored, &x, (inputs, outputs), threads)?;
    }
}

/// A model of codes gives the logits of the model of the numbers, and both are the float64 reference within rounding.
#[test]
fn logits_are_those_of_the_numbers() {
    let shape = ModelShape { hidden_size: 96, intermediate_size: 160, head_dim: 32, ..SMALL };
    for (kind, bf16) in [(QWEN3, false), (LLAMA3, true), (LLAMA_BIAS, false)] {
        for code_bits in [8, 4] {
            let quantized = Model::random(shape, 2, Kind { bf16, code_bits, ..kind }, 5);
            let tokens: Vec<usize> = (0..20).map(|i| i * 7 % shape.vocab_size).collect();
            let logits = |model: &Model, isa| {
                let mut decoder = Decoder::with_isa(model.weights(), Arc::new(Pool::new(2).unwrap()), isa);
                let rows: Vec<_> = tokens.iter().enumerate().map(|(p, &token)| (0, Some(p), token)).collect();
                Host::new(model, 1, tokens.len(), 5, 1).logits(&mut decoder, &rows).concat()
            };
            let found = logits(&quantized, Isa::detect());
            let exact = quantized.reference(&tokens).concat();
            let worst = found.iter().zip(&exact).fold(0.0_f64, |worst, (&x, exact)| worst.max(exact.off(x)));
            assert!(worst < 1.0, "{kind:?} {code_bits} bits: {worst} of what rounding explains");
            let mut dense = Model { kind: Kind { code_bits: 0, bf16: false, ..quantized.kind }, ..quantized };
            for layer in &mut dense.layers {
                for part in [
                    &mut layer.q,
                    &mut layer.k,
                    &mut layer.v,
                    &mut layer.o,
                    &mut layer.gate,
                    &mut layer.up,
                    &mut layer.down,
                ] {
                    part.stored = None;
                }
            }
            if !bf16 {
                for isa in Isa::available() {
                    let same = logits(&dense, isa).iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{kind:?} {code_bits} bits on {}", isa.name());
                }
            }
        }
    }
}

#[test]
fn what_cannot_be_quantized_is_named() {
    let (mut codes, mut bytes, mut scales) = ([0; 128], [0; 64], [Bf16(0); 2]);
    for (bad, shown) in
        [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "-inf"), (2_f32.powi(127), "170141180000000000000000000000000000000")]
    {
        let mut weight = vec![1.0; 128];
        weight[64 + 5] = bad;
        let weight = values(&weight, false);
        let message = format!("up_proj[1, 5] = {shown} is not allowed: expected a number of less than 2^127");
        let error = quantize_int8("up_proj", &weight, 64, &mut codes, &mut scales, 3).unwrap_err();
        assert_eq!(error.to_string(), message);
        let error = quantize_int4("up_proj", &weight, 64, &mut bytes, &mut scales, 3).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    let weight = values(&[1.0; 128], false);
    let error = quantize_int8("w", &weight, 64, &mut codes[..127], &mut scales, 1).unwrap_err().to_string();
    assert_eq!(error, "codes = 127 elements is not allowed: expected 128 elements");
    let error = quantize_int8("w", &weight, 64, &mut codes, &mut scales[..1], 1).unwrap_err().to_string();
    assert_eq!(error, "w = 128 elements is not allowed: expected 64 elements");
    let error = quantize_int4("w", &weight, 64, &mut bytes, &mut scales[..1], 1).unwrap_err().to_string();
    assert_eq!(error, "scales = 1 elements is not allowed: expected 2 x groups of a multiple of 32 among 64 inputs");
    let error =
        quantize_int4("w", &values(&[1.0; 80], false), 40, &mut bytes[..40], &mut scales, 1).unwrap_err().to_string();
    assert_eq!(error, "scales = 2 elements is not allowed: expected 2 x groups of a multiple of 32 among 40 inputs");
}

#[test]
fn codes_that_do_not_fit_are_refused() {
    let part = |weight: Weight| Linear::new("o", 64, vec![Part::new(weight, None, 2)]).err().unwrap().to_string();
    let scales = |len| Values::Bf16(Memory::from_vec(vec![Bf16(0); len]));
    let int8 = |len, scale| Weight::Int8 { codes: Memory::from_vec(vec![0; len]), scales: scales(scale) };
    let int4 = |len, scale| Weight::Int4 { codes: Memory::from_vec(vec![0; len]), scales: scales(scale) };
    assert_eq!(part(int8(127, 2)), "o.parts[0].weight's codes = 127 elements is not allowed: expected 128 elements");
    for wrong in [0, 1, 3, 6, 16] {
        let allowed = "2 x groups of a multiple of 16 among 64 inputs";
        let expected = format!("o.parts[0].weight's scales = {wrong} elements is not allowed: expected {allowed}");
        assert_eq!(part(int8(128, wrong)), expected);
    }
    assert_eq!(part(int4(128, 2)), "o.parts[0].weight's codes = 128 elements is not allowed: expected 64 elements");
    for wrong in [0, 1, 3, 8] {
        let allowed = "2 x groups of a multiple of 32 among 64 inputs";
        let expected = format!("o.parts[0].weight's scales = {wrong} elements is not allowed: expected {allowed}");
        assert_eq!(part(int4(64, wrong)), expected);
    }
    for right in [2, 4] {
        Linear::new("o", 64, vec![Part::new(int4(64, right), None, 2)]).unwrap();
        Linear::new("o", 64, vec![Part::new(int8(128, 2 * right), None, 2)]).unwrap();
    }
}

/// The same weights and tokens give these bits on every machine.
#[test]
fn bits_are_frozen() {
    let shape = ModelShape { hidden_size: 96, intermediate_size: 160, head_dim: 32, ..SMALL };
    for (code_bits, frozen) in [(8, 0x2FEA_1F14_FC26_D297), (4, 0x2CB9_4075_AE54_56C4)] {
        let mut model = Model::random(shape, 2, Kind { code_bits, ..QWEN3 }, 77);
        model.frequencies = (0..shape.head_dim / 2).map(|i| 1.0 / (1 + i * i) as f32).collect();
        for isa in Isa::available() {
            let mut host = Host::new(&model, 1, 70, 16, 1);
            let rows: Vec<_> = (0..70).map(|p| (0, Some(p), p * 11 % shape.vocab_size)).collect();
            let mut decoder = Decoder::with_isa(model.weights(), Arc::new(Pool::new(2).unwrap()), isa);
            let fnv = |hash: u64, x: &f32| (hash ^ u64::from(x.to_bits())).wrapping_mul(0x0100_0000_01B3);
            let hash = host.logits(&mut decoder, &rows).concat().iter().fold(0xCBF2_9CE4_8422_2325, fnv);
            assert_eq!(hash, frozen, "{hash:#018X}, {code_bits} bits on {}", isa.name());
        }
    }
}
