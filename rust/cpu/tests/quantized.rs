//! INT8 and INT4 weights: the maximum quantization error, and their products.

mod support;

use proptest::prelude::*;
use specrs_cpu::{
    Bf16, Decoder, DecoderWeights, Isa, Linear, Memory, ModelShape, Packed, Part, Pool, Rounding, Values, Weight,
    Weights, quantize,
};
use std::sync::Arc;
use support::{Host, Kind, LLAMA_BIAS, LLAMA3, Model, Numbers, QWEN3, SMALL, Stored};

/// Returns a decoder without layers, which computes the product with its LM head.
fn head(isa: Isa, threads: usize, inputs: usize, outputs: usize, weight: impl Into<Weight>) -> Decoder {
    let shape = ModelShape { hidden_size: inputs, vocab_size: outputs, ..SMALL };
    let zeros = |len| Values::F32(Memory::from_vec(vec![0.0; len]));
    let head = Linear::new("head", inputs, vec![Part::new(weight, None, outputs)]).unwrap();
    let weights = DecoderWeights {
        shape,
        embedding: zeros(outputs * inputs).into(),
        layers: vec![],
        final_norm: zeros(inputs),
        lm_head: head,
        frequencies: vec![1.0; SMALL.head_dim / 2],
    };
    Decoder::with_isa(Arc::new(Weights::new(weights).unwrap()), Arc::new(Pool::new(threads).unwrap()), isa)
}

/// Returns weights whose groups differ by powers of two; some groups are all zeros. They are bf16 or fp32.
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

/// Returns the products of rows of `x` with integers and scales, and checks that they have the same bits on every
/// instruction set.
fn products(
    stored: &Stored,
    x: &[f32],
    (inputs, outputs): (usize, usize),
    threads: usize,
    rounding: Rounding,
) -> Result<Vec<f32>, TestCaseError> {
    let mut expected: Option<Vec<f32>> = None;
    for isa in Isa::available() {
        let mut y = vec![f32::NAN; x.len() / inputs * outputs];
        let mut head = head(isa, threads, inputs, outputs, stored.weight()).with_rounding(rounding);
        head.logits(x, outputs, &mut y).unwrap();
        for (y, expected) in y.iter().zip(expected.iter().flatten()) {
            prop_assert_eq!(y.to_bits(), expected.to_bits(), "{} for {} on {}", y, expected, isa.name());
        }
        expected = Some(y);
    }
    Ok(expected.expect("portable code is always there"))
}

/// Generates the number of bits, of inputs, and of inputs per group.
fn kinds() -> impl Strategy<Value = (u32, usize, usize)> {
    let group = prop::sample::select(vec![32, 64, 96, 128]);
    (prop::sample::select(vec![4, 8]), group, 1..5_usize)
        .prop_map(|(bits, group, groups)| (bits, group * groups, group))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Checks that every weight is off by at most half its scale, and that a scale is hardly larger than the largest
    /// weight of its group needs.
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
        let codes = stored.codes();
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

    /// Checks that products are off from exact ones by the rounding of rows and sums, and from those of the original
    /// weights by at most the sum of |x| scale / 2 more.
    #[test]
    fn products_are_those_of_the_numbers(
        (code_bits, inputs, group) in kinds(),
        outputs in 1..40_usize,
        rows in 1..40_usize,
        threads in 1..4_usize,
        int8 in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let (rounding, largest) = if int8 { (Rounding::Int8, 127.0) } else { (Rounding::Int16, 32_512.0) };
        let n = &mut Numbers(seed);
        let weight = draw(n, outputs * inputs, false);
        let stored = Stored::new(&values(&weight, false), inputs, code_bits, group, 2);
        let codes = stored.codes();
        let x: Vec<f32> = (0..rows * inputs).map(|_| n.unit()).collect();
        let found = products(&stored, &x, (inputs, outputs), threads, rounding)?;
        for (i, y) in found.iter().enumerate() {
            let (output, x) = (i % outputs * inputs, &x[i / outputs * inputs..][..inputs]);
            let (mut exact, mut before, mut rounding, mut bound) = (0.0, 0.0, 0.0, 0.0);
            for (block, x) in x.chunks_exact(32).enumerate() {
                let unit = x.iter().fold(0.0_f64, |most, &x| most.max(f64::from(x).abs())) / largest;
                let mut size = 0.0;
                for (j, &x) in x.iter().enumerate() {
                    let (x, (q, s)) = (f64::from(x), codes[output + 32 * block + j]);
                    let number = f64::from(q) * f64::from(s);
                    exact += number * x;
                    size += number.abs() * x.abs();
                    // The last term is what the quotient and the product round.
                    rounding += number.abs() * (unit * 0.501 + x.abs() * 2_f64.powi(-22));
                    before += f64::from(weight[output + 32 * block + j]) * x;
                    bound += x.abs() * f64::from(s) / 2.0;
                }
                rounding += 2_f64.powi(-24) * (inputs / 32 + 2) as f64 * size;
            }
            prop_assert!((f64::from(*y) - exact).abs() <= rounding, "{y} {exact} {rounding}");
            prop_assert!((f64::from(*y) - before).abs() <= rounding + bound * (1.0 + 1e-12));
        }
    }
}

/// Checks that a quantized model gives the logits of the float64 reference within rounding, with the same bits on every
/// instruction set.
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
            for isa in Isa::available() {
                let same = logits(&quantized, isa).iter().zip(&found).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{kind:?} {code_bits} bits on {}", isa.name());
            }
        }
    }
}

#[test]
fn what_cannot_be_quantized_is_named() {
    let (mut codes, mut scales) = ([0; 128], [Bf16(0); 2]);
    for (bad, shown) in
        [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "-inf"), (2_f32.powi(127), "170141180000000000000000000000000000000")]
    {
        let mut weight = vec![1.0; 128];
        weight[64 + 5] = bad;
        let error = quantize("up_proj", &values(&weight, false), 64, 7, &mut codes, &mut scales, 3).unwrap_err();
        let message = format!("up_proj[1, 5]={shown}: must be a number of less than 2^127");
        assert_eq!(error.to_string(), message);
    }
    let weight = values(&[1.0; 128], false);
    let error = quantize("w", &weight, 64, 127, &mut codes[..127], &mut scales, 1).unwrap_err().to_string();
    assert_eq!(error, "codes=127 elements: must be 128");
    let error = quantize("w", &weight, 64, 127, &mut codes, &mut scales[..1], 1).unwrap_err().to_string();
    assert_eq!(
        error,
        "scales=1 elements: must be 2 for each group of inputs, with groups that are a multiple of 1 and divide 64"
    );
    let error = quantize("w", &weight, 60, 127, &mut codes, &mut scales, 1).unwrap_err().to_string();
    assert_eq!(error, "w=128 elements: must be 120");
}

#[test]
fn integers_that_cannot_be_packed_are_named() {
    let packed = |values: &[i16], inputs, scales: &[f32]| Packed::grouped("o", values, inputs, scales, 2);
    let error = |values: &[i16], inputs, scales: &[f32]| packed(values, inputs, scales).err().unwrap().to_string();
    for wrong in [0, 1, 3, 8] {
        let allowed = "2 for each group of inputs, with groups that are a multiple of 32 and divide 64";
        let expected = format!("o's scales={wrong} elements: must be {allowed}");
        assert_eq!(error(&[0; 128], 64, &vec![1.0; wrong]), expected);
    }
    assert_eq!(error(&[0; 64], 32, &[1.0, f32::NAN]), "o's scales=NaN: must be a finite number");
    for inputs in [0, 32] {
        assert_eq!(error(&[], inputs, &[]), "o's values=0 elements: must be at least 1 element");
    }
    for (q, given) in [(128, "integers from 0 to 128"), (-129, "integers from -129 to 0")] {
        let mut values = [0; 64];
        values[33] = q;
        let expected = format!("o's values={given}: must be integers from -128 to 127");
        assert_eq!(error(&values, 32, &[1.0, 1.0]), expected);
    }
    for groups in [2, 4] {
        assert_eq!(packed(&[0; 128], 64, &vec![1.0; groups]).unwrap().outputs(), 2);
    }
}

/// Checks that fixed weights and tokens give fixed bits on every machine.
#[test]
fn bits_are_frozen() {
    let shape = ModelShape { hidden_size: 96, intermediate_size: 160, head_dim: 32, ..SMALL };
    for (code_bits, frozen) in [(8, 0x5876_0853_A2BE_F9AB), (4, 0x1606_4C7F_3572_EE76)] {
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
