//! Choice of experts, and their weights against float64.

use specrs_cpu_kernels::{Isa, Route};

#[test]
fn rows_go_to_the_largest_logits() {
    let cases: [(&[f32], &[usize]); 5] = [
        (&[0.0, 3.0, -1.0, 3.0, 2.0], &[1, 3, 4]),
        (&[1.0, 1.0, 1.0, 1.0], &[0, 1, 2]),
        (&[-5.0, -4.0, -3.0], &[2, 1, 0]),
        (&[f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, -1.0], &[1, 3, 0]),
        (&[9.0; 40], &[0, 1, 2]),
    ];
    for (logits, expected) in cases {
        let exps: Vec<f64> = logits.iter().map(|&x| f64::from(x).exp()).collect();
        for (isa, normalized) in Isa::available().into_iter().flat_map(|isa| [(isa, false), (isa, true)]) {
            let (mut chosen, mut shares) = ([99; 3], [f32::NAN; 3]);
            let mut logits = logits.to_vec();
            Route { logits: &mut logits, normalized, sigmoids: false, chosen: &mut chosen, shares: &mut shares }
                .run(isa);
            assert_eq!(chosen[..], *expected, "{}", isa.name());
            let total: f64 = if normalized { expected.iter().map(|&id| exps[id]).sum() } else { exps.iter().sum() };
            for (share, &id) in shares.iter().zip(expected) {
                assert!((f64::from(*share) - exps[id] / total).abs() < 1e-6, "{}: {share}", isa.name());
            }
        }
    }
}

#[test]
fn nan_is_not_lost_and_experts_differ() {
    for isa in Isa::available() {
        for at in 0..5 {
            let (mut chosen, mut shares, mut logits) = ([99; 2], [0.0; 2], [0.5, 1.5, 2.5, 3.5, 4.5]);
            logits[at] = f32::NAN;
            Route { logits: &mut logits, normalized: true, sigmoids: false, chosen: &mut chosen, shares: &mut shares }
                .run(isa);
            assert!(chosen[0] != chosen[1] && chosen.iter().all(|&id| id < 5), "{}: {chosen:?}", isa.name());
            assert!(shares.iter().all(|share| share.is_nan()), "{}: {shares:?}", isa.name());
        }
    }
}
