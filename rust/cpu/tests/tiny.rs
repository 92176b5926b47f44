//! Passes of a few rows of a tiny model by one thread and by several: small enough for slow interpreters and sanitizers.

mod support;

use specrs_cpu::{Decoder, ModelShape, Output, Pool};
use std::sync::Arc;
use support::{Host, Kind, LLAMA_BIAS, Model, QWEN3};

#[test]
fn tiny_passes_are_the_same_by_one_thread_and_by_several() {
    let kinds = [(QWEN3, 1), (Kind { bf16: true, ..LLAMA_BIAS }, 2), (LLAMA_BIAS, 2)];
    // Miri takes 20 seconds for what is microseconds. Two threads and one KV head, or two: both ways to share attention.
    let (kinds, most) = if cfg!(miri) { (&kinds[..2], 2) } else { (&kinds[..], 5) };
    for &(kind, num_kv_heads) in kinds {
        let shape = ModelShape {
            vocab_size: 35,
            hidden_size: 18,
            intermediate_size: 20,
            num_heads: 2,
            num_kv_heads,
            head_dim: 4,
            rms_norm_eps: 1e-6,
        };
        let model = Model::random(shape, 1, kind, 3);
        let mut first = None;
        for threads in 1..=most {
            let mut decoder = Decoder::new(model.weights(), Arc::new(Pool::new(threads).unwrap()));
            let mut host = Host::new(&model, 2, 5, 2, 3);
            let rows = [(1, Some(0), 3), (1, Some(1), 4), (0, None, 1), (0, Some(0), 9)];
            let mut logits = host.logits(&mut decoder, &rows).concat();
            let (mut ids, mut top) = ([0; 2], [0.0; 2]);
            let output = Output::Argmax { rows: &[0, 1], num_ids: 35, ids: &mut ids, top: &mut top };
            host.pass(&mut decoder, &[(1, Some(2), 7), (1, Some(3), 8)], output);
            logits.extend(top);
            let bits: Vec<u32> = logits.iter().map(|x| x.to_bits()).collect();
            assert_eq!(first.get_or_insert_with(|| bits.clone()), &bits, "{kind:?}, {threads} threads");
        }
    }
}
