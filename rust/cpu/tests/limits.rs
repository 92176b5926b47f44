//! Limits of a pass: the last position and slot, the shortest sums, and what is rejected.

mod support;

use specrs_cpu::{
    Activation, Decoder, E4m3, E5m2, Isa, KvCache, Memory, MemoryMut, Output, Pass, Pool, QueryScaling, Values,
    ValuesMut, Weights,
};
use std::sync::Arc;
use support::{GROWTH, Host, Kind, Model, Numbers, QWEN3, SMALL, WINDOWED};

fn decoder(model: &Model, isa: Isa, threads: usize) -> Decoder {
    Decoder::with_isa(model.weights(), Arc::new(Pool::new(threads).unwrap()), isa)
}

/// Checks the row at position 131,071, whose slot is the last of the pool. It attends to 131,070 random keys, to the
/// row before it and to itself.
#[test]
fn the_last_position_and_slot_are_the_reference() {
    const LEN: usize = 131_072;
    for (block_size, bf16) in [(16, false), (7, false), (16, true)] {
        let model = Model::random(SMALL, 1, Kind { bf16, ..QWEN3 }, 21);
        let mut found: Option<Vec<u32>> = None;
        for isa in Isa::available() {
            let mut host = Host::new(&model, 1, LEN, block_size, 9);
            let last = host.table.iter().position(|&block| block == host.table.len() as i64 - 1).unwrap();
            let end = host.max_blocks - 1;
            host.table.swap(last, end);
            let prefix = host.fill(&model, LEN - 2, 4);
            let rows = [(0, Some(LEN - 2), 3), (0, Some(LEN - 1), 8)];
            let logits = host.logits(&mut decoder(&model, isa, 2), &rows);
            if found.is_none() {
                let exact = model.reference_behind(&[3, 8], &prefix);
                for (x, exact) in logits.concat().iter().zip(exact.concat()) {
                    assert!(exact.off(*x) < 1.0, "{x} for {exact:?}, blocks of {block_size}, bf16: {bf16}");
                }
            }
            let bits: Vec<u32> = logits.concat().iter().map(|x| x.to_bits()).collect();
            assert_eq!(found.get_or_insert_with(|| bits.clone()), &bits, "{}", isa.name());
        }
    }
}

/// Checks that the error of a product is at most u (inputs / 16 + 6) times the sum of the products' absolute values:
/// each of 16 sums rounds once per input, their tree 4 times, and rounding errors of rounding errors add less than one
/// more.
#[test]
fn products_are_exact_within_their_length() {
    let n = &mut Numbers(13);
    for inputs in (1..70).chain([255, 256, 257, 768, 1000, 4096]) {
        for bf16 in [false, true] {
            let shape = specrs_cpu::ModelShape { hidden_size: inputs, vocab_size: 37, ..SMALL };
            let model = Model::random(shape, 0, Kind { bf16, ..QWEN3 }, n.next());
            for isa in Isa::available() {
                let mut decoder = decoder(&model, isa, 2);
                let rows = 1 + n.below(14);
                let x: Vec<f32> = (0..rows * inputs).map(|_| n.unit()).collect();
                let mut y = vec![f32::NAN; rows * 37];
                decoder.logits(&x, 37, &mut y).unwrap();
                for (i, y) in y.iter().enumerate() {
                    let w = &model.lm_head.weight[i % 37 * inputs..][..inputs];
                    let products = w.iter().zip(&x[i / 37 * inputs..]).map(|(&w, &x)| f64::from(w) * f64::from(x));
                    let (exact, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
                    let bound = 2_f64.powi(-24) * (inputs.div_ceil(16) + 6) as f64 * size;
                    let error = (f64::from(*y) - exact).abs();
                    assert!(error <= bound, "{} {inputs} inputs: {error:e} above {bound:e}", isa.name());
                }
            }
        }
    }
}

/// Checks that positions before the windows of all layers, and before the start of a row's KV, are not read: they hold
/// NaN.
#[test]
fn positions_outside_a_window_are_not_read() {
    for (window, block_size) in [(1, 4), (7, 3), (16, 16), (20, 5), (33, 16)] {
        let model = Model::random(SMALL, 2, Kind { window, ..WINDOWED }, 21);
        let tokens: Vec<usize> = (0..70).map(|p| p * 11 % SMALL.vocab_size).collect();
        for isa in Isa::available() {
            let mut decoder = decoder(&model, isa, 2);
            let mut host = Host::new(&model, 1, 70, block_size, 1);
            let rows: Vec<_> = tokens.iter().enumerate().map(|(p, &token)| (0, Some(p), token)).collect();
            let expected = host.logits(&mut decoder, &rows);
            host.forget(&model, 67 + 1 - window);
            let found = host.logits(&mut decoder, &rows[67..]);
            assert_eq!(bits_of(&found), bits_of(&expected[67..]), "{}, window {window}", isa.name());
            // Rows that begin at a position attend it and those behind it alone.
            if window > 3 {
                host.forget(&model, 66);
                host.k_start = vec![66];
                let begun = host.logits(&mut decoder, &rows[66..]);
                assert!(begun.concat().iter().all(|x| x.is_finite()), "{}, window {window}", isa.name());
                assert_ne!(bits_of(&begun[1..]), bits_of(&found));
            }
        }
    }
}

fn bits_of(logits: &[Vec<f32>]) -> Vec<u32> {
    logits.concat().iter().map(|x| x.to_bits()).collect()
}

/// Checks that fixed weights and tokens give fixed bits on every machine.
#[test]
fn bits_are_frozen() {
    let mut hashes = Vec::new();
    for bf16 in [false, true] {
        let mut model = Model::random(SMALL, 2, Kind { bf16, ..QWEN3 }, 77);
        // Exact on every machine, which a power is not.
        model.frequencies = (0..SMALL.head_dim / 2).map(|i| 1.0 / (1 + i * i) as f32).collect();
        for isa in Isa::available() {
            let mut host = Host::new(&model, 1, 70, 16, 1);
            let rows: Vec<_> = (0..70).map(|p| (0, Some(p), p * 11 % SMALL.vocab_size)).collect();
            let logits = host.logits(&mut decoder(&model, isa, 2), &rows);
            let fnv = |hash: u64, x: &f32| (hash ^ u64::from(x.to_bits())).wrapping_mul(0x0100_0000_01B3);
            hashes.push((bf16, logits.concat().iter().fold(0xCBF2_9CE4_8422_2325, fnv)));
        }
    }
    for (bf16, hash) in hashes {
        let frozen = if bf16 { 0x15E1_FD61_B478_527F } else { 0xD85A_CBC8_ADC4_6CC4 };
        assert_eq!(hash, frozen, "{hash:#018X}, bf16: {bf16}");
    }
}

/// Checks that ties go to the lowest id, wherever the equal logits are: in its vector, or in another thread's share.
#[test]
fn ties_go_to_the_lowest_id() {
    let shape = specrs_cpu::ModelShape { vocab_size: 211, ..SMALL };
    for same in [[7, 8, 210], [0, 64, 100], [31, 150, 151], [208, 209, 210]] {
        let mut model = Model::random(shape, 1, Kind { tied: false, ..QWEN3 }, 3);
        let weight = &mut model.lm_head.weight;
        for (id, row) in weight.chunks_exact_mut(SMALL.hidden_size).enumerate() {
            row.fill(if same.contains(&id) { 0.0 } else { -1.0 });
        }
        for isa in Isa::available() {
            for threads in [1, 2, 5] {
                // All features are positive, so all other logits are negative.
                let hidden = [0.5; SMALL.hidden_size];
                let (mut ids, mut top) = ([-1], [f32::NAN]);
                decoder(&model, isa, threads).argmax(&hidden, 211, &mut ids, &mut top).unwrap();
                assert_eq!((ids[0], top[0].to_bits()), (same[0] as i64, 0), "{} {threads} threads", isa.name());
            }
        }
    }
}

/// Checks that NaN in a weight reaches the logits, and that argmax reports it.
#[test]
fn nan_is_not_lost() {
    for isa in Isa::available() {
        let mut model = Model::random(SMALL, 1, Kind { tied: false, ..QWEN3 }, 3);
        model.lm_head.weight[5 * SMALL.hidden_size] = f32::NAN;
        let mut host = Host::new(&model, 1, 4, 4, 1);
        let (mut ids, mut top) = ([0], [0.0]);
        let output = Output::Argmax { rows: &[0], num_ids: SMALL.vocab_size, ids: &mut ids, top: &mut top };
        host.pass(&mut decoder(&model, isa, 2), &[(0, Some(0), 3)], output);
        assert!(ids == [5] && top[0].is_nan(), "{} {ids:?} {top:?}", isa.name());
        for gate in [true, false] {
            let mut model = Model::random(SMALL, 1, QWEN3, 3);
            let layer = &mut model.layers[0];
            let weight = if gate { &mut layer.gate.weight } else { &mut layer.k.weight };
            weight[0] = f32::NAN;
            let mut host = Host::new(&model, 1, 4, 4, 1);
            let logits = host.logits(&mut decoder(&model, isa, 2), &[(0, Some(0), 3)]);
            assert!(logits[0].iter().all(|x| x.is_nan()), "{} gate: {gate}", isa.name());
        }
    }
}

#[test]
fn wrong_input_is_named() {
    let model = Model::random(SMALL, 1, QWEN3, 3);
    let mut decoder = decoder(&model, Isa::detect(), 1);
    let mut kv = model.kv_cache(4, 3);
    let table = [0, 1, 2, 3, 4, -1];
    let base = Pass {
        tokens: &[1, 2],
        positions: &[0, 1],
        slots: &[0, 1],
        sequences: &[0, 0],
        block_table: &table,
        max_blocks: 3,
        ..Pass::default()
    };
    let mut refuse = |pass: Pass<'_>, expected: &str| {
        let error = decoder.forward(&pass, &mut kv, Output::Nothing).unwrap_err();
        assert_eq!(error.to_string(), expected);
        let ValuesMut::F32(layer) = &kv.layers_mut()[0] else { unreachable!() };
        assert!(layer.as_slice().iter().all(|x| x.to_bits() == 0), "something was written: {expected}");
    };
    refuse(Pass { tokens: &[1, 50], ..base }, "tokens[1]=50: must be from 0 to vocab_size - 1 = 49");
    refuse(Pass { tokens: &[-1, 5], ..base }, "tokens[0]=-1: must be from 0 to vocab_size - 1 = 49");
    refuse(Pass { slots: &[0, 12], ..base }, "slots[1]=12: must be from -1 to 11");
    refuse(Pass { slots: &[-2, 1], ..base }, "slots[0]=-2: must be from -1 to 11");
    refuse(Pass { slots: &[0], ..base }, "slots=1 elements: must be 2");
    refuse(Pass { positions: &[0, 9], ..base }, "positions[1]=9: must be from -1 to max_blocks * block_size - 1 = 8");
    refuse(
        Pass { positions: &[4, 4], ..base },
        "positions[1]=4: must be above 4, the position of the sequence's row before",
    );
    refuse(Pass { sequences: &[0, 2], ..base }, "sequences[1]=2: must be one of the block table's 2 rows");
    refuse(
        Pass { sequences: &[0, 1], positions: &[0, 3], ..base },
        "block_table[1, 1]=4: must be from 0 to num_blocks - 1 = 3",
    );
    refuse(Pass { k_start: &[1], ..base }, "k_start[0]=1: must be from 0 to 0, the position of row 0");
    refuse(Pass { k_start: &[-1], ..base }, "k_start[0]=-1: must be from 0 to 0, the position of row 0");
    // Entries past a row's position are never looked at.
    decoder.forward(&Pass { sequences: &[0, 1], positions: &[0, 2], ..base }, &mut kv, Output::Nothing).unwrap();
    let mut other = Model::random(SMALL, 2, QWEN3, 3).kv_cache(4, 3);
    let error = decoder.forward(&base, &mut other, Output::Nothing).unwrap_err().to_string();
    assert!(error.starts_with("kv_cache's [layers, num_kv_heads, head_dim]=[2, 2, 10]"), "{error}");
    for threads in [0, 257] {
        let error = Pool::new(threads).err().unwrap().to_string();
        assert_eq!(error, format!("threads={threads}: must be from 1 to 256"));
    }
    let error = Isa::by_name("mmx").unwrap_err().to_string();
    assert!(error.starts_with("instructions=mmx: must be one of ") && error.ends_with("portable"), "{error}");
}

#[test]
fn misaligned_memory_is_refused() {
    let numbers = [0.0_f32; 8];
    let odd = numbers.as_ptr().wrapping_byte_add(2);
    // SAFETY: refused before anything is read.
    let error = unsafe { Memory::borrow("q_proj", odd, 4, Box::new(())) }.err().unwrap().to_string();
    assert!(error.starts_with("q_proj's address=") && error.ends_with("a multiple of 4 other than 0"), "{error}");
    // SAFETY: as above.
    assert!(unsafe { MemoryMut::<f32>::borrow("kv", std::ptr::null_mut(), 4, Box::new(())) }.is_err());
    let shape = specrs_cpu::KvShape { num_blocks: 1, block_size: 2, num_kv_heads: 1, head_dim: 2 };
    let layer = ValuesMut::F32(MemoryMut::from_vec(vec![0.0; 15]));
    let error = KvCache::new(shape, vec![layer]).err().unwrap().to_string();
    assert_eq!(error, "kv_cache.layers[0]=15 elements: must be 16");
    assert_eq!(Values::F32(Memory::from_vec(vec![1.0; 3])).len(), 3);
}

#[test]
fn caches_of_two_types_and_scales_that_are_none_are_refused() {
    let shape = specrs_cpu::KvShape { num_blocks: 1, block_size: 2, num_kv_heads: 1, head_dim: 2 };
    let layers = vec![
        ValuesMut::E4m3(MemoryMut::from_vec(vec![E4m3(0); 16])),
        ValuesMut::E5m2(MemoryMut::from_vec(vec![E5m2(0); 16])),
    ];
    let error = KvCache::new(shape, layers).err().unwrap().to_string();
    assert_eq!(error, "kv_cache.layers[1]=another type: must be the type of layer 0");
    let weights = || Arc::try_unwrap(Model::random(SMALL, 1, QWEN3, 3).weights()).ok().unwrap();
    let refused = |made: specrs_cpu::Result<Weights>| made.err().unwrap().to_string();
    let allowed = "must be a finite number above 0";
    assert_eq!(refused(weights().with_kv_scales(&[(1.0, 0.0)])), format!("kv_scales[0] of V=0: {allowed}"));
    assert_eq!(refused(weights().with_kv_scales(&[(f32::NAN, 1.0)])), format!("kv_scales[0] of K=NaN: {allowed}"));
    assert!(refused(weights().with_kv_scales(&[])).starts_with("kv_scales=0 elements"));
    let clamped = |alpha, limit| weights().with_activation(Activation::ClampedSwiglu { alpha, limit });
    assert_eq!(refused(clamped(-1.0, 7.0)), format!("activation's alpha=-1: {allowed}"));
    assert_eq!(refused(clamped(1.7, f32::INFINITY)), format!("activation's limit=inf: {allowed}"));
    let scaling = |beta, length| weights().with_query_scaling(QueryScaling { beta, length, ..GROWTH });
    assert_eq!(refused(scaling(0.0, 9)), format!("query_scaling's beta=0: {allowed}"));
    assert_eq!(refused(scaling(0.1, 0)), "query_scaling's length=0: must be at least 1");
}
