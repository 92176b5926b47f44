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
            Route {
                logits: &mut logits,
                normalized,
                sigmoids: false,
                bias: &[],
                chosen: &mut chosen,
                shares: &mut shares,
            }
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
            Route {
                logits: &mut logits,
                normalized: true,
                sigmoids: false,
                bias: &[],
                chosen: &mut chosen,
                shares: &mut shares,
            }
            .run(isa);
            assert!(chosen[0] != chosen[1] && chosen.iter().all(|&id| id < 5), "{}: {chosen:?}", isa.name());
            assert!(shares.iter().all(|share| share.is_nan()), "{}: {shares:?}", isa.name());
        }
    }
}

/// Returns the chosen experts and their weights, by sigmoids.
fn by_sigmoids(isa: Isa, logits: &[f32], bias: &[f32], normalized: bool) -> ([usize; 2], [f32; 2]) {
    let (mut chosen, mut shares) = ([99; 2], [f32::NAN; 2]);
    let logits = &mut logits.to_vec();
    Route { logits, normalized, sigmoids: true, bias, chosen: &mut chosen, shares: &mut shares }.run(isa);
    (chosen, shares)
}

#[test]
fn biases_choose_and_do_not_weigh() {
    let (logits, bias) = ([2.0, -1.0, 0.5, 1.0, -40.0], [-0.5, 0.6, 0.0, 0.0, 0.25]);
    let sigmoid = |x: f32| 1.0 / (1.0 + f64::from(-x).exp());
    for isa in Isa::available() {
        for normalized in [false, true] {
            for (bias, expected) in [(&[][..], [0, 3]), (&bias[..], [1, 3]), (&[1.0; 5][..], [0, 3])] {
                let (chosen, shares) = by_sigmoids(isa, &logits, bias, normalized);
                assert_eq!(chosen, expected, "{}", isa.name());
                let total = expected.iter().map(|&id| sigmoid(logits[id])).sum::<f64>() + 1e-6;
                for (share, id) in shares.into_iter().zip(expected) {
                    let weight = sigmoid(logits[id]) / if normalized { total } else { 1.0 };
                    assert!((f64::from(share) - weight).abs() < 1e-7, "{}: {share}", isa.name());
                }
            }
        }
        // The sum may be tiny.
        let (_, shares) = by_sigmoids(isa, &[-40.0; 3], &[], true);
        assert!(shares.iter().all(|&share| share < 1e-10), "{}: {shares:?}", isa.name());
        let (chosen, _) = by_sigmoids(isa, &[f32::NAN, f32::NAN, 1.0], &[0.0; 3], true);
        assert!(chosen[0] != chosen[1] && chosen.iter().all(|&id| id < 3), "{}: {chosen:?}", isa.name());
    }
}
