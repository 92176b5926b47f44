use super::*;
use proptest::prelude::*;

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}

fn line(draft_ms: f64, target_ms: f64, vanilla_ms: f64) -> CostLine {
    CostLine { draft_ms, target_ms, vanilla_ms }
}

/// Generates the three arguments of a grid, with costs in any order.
fn grids() -> impl Strategy<Value = (Vec<usize>, Vec<usize>, Vec<f64>)> {
    let batches = proptest::collection::btree_set(1_usize..60, 1..5);
    let ks = proptest::collection::btree_set(1_usize..12, 0..5);
    (batches, ks).prop_flat_map(|(batches, ks)| {
        let batches: Vec<usize> = batches.into_iter().collect();
        let ks: Vec<usize> = std::iter::once(0).chain(ks).collect();
        let size = batches.len() * ks.len();
        (Just(batches), Just(ks), proptest::collection::vec(0.1_f64..100.0, size))
    })
}

proptest! {
    #[test]
    fn lines_are_lines_at_every_k(d in 0.0_f64..10.0, t in 0.1_f64..100.0, v in 0.1_f64..100.0, k in 1_usize..50) {
        let model = CostModel::lines(&[1], &[line(d, t, v)]).unwrap();
        prop_assert!(close(model.ms(1, k), k as f64 * d + t));
        prop_assert!(close(model.ms(7, k), k as f64 * d + t));
        prop_assert!(close(model.ms(1, 0), v));
        let tpot = model.tpot(1, k, 1.5).unwrap();
        prop_assert!((CostLine::implied_draft_ms(tpot, k, 1.5, t).unwrap() - d).abs() < 1e-9);
        prop_assert!(close(model.speedup(1, k, 1.5).unwrap(), v * 1.5 / (k as f64 * d + t)));
    }

    #[test]
    fn grid_points_are_kept_and_the_rest_lies_between_its_neighbours((batches, ks, ms) in grids()) {
        let model = CostModel::new(&batches, &ks, &ms).unwrap();
        for (b, &batch) in batches.iter().enumerate() {
            for (j, &k) in ks.iter().enumerate() {
                prop_assert!(close(model.ms(batch, k), ms[b * ks.len() + j]));
            }
        }
        for pair in batches.windows(2) {
            for batch in pair[0]..=pair[1] {
                for &k in &ks {
                    let share = (batch - pair[0]) as f64 / (pair[1] - pair[0]) as f64;
                    let expected = (1.0 - share) * model.ms(pair[0], k) + share * model.ms(pair[1], k);
                    prop_assert!(close(model.ms(batch, k), expected));
                }
            }
        }
        for pair in ks.windows(2).filter(|pair| pair[0] > 0) {
            for k in pair[0]..=pair[1] {
                let share = (k - pair[0]) as f64 / (pair[1] - pair[0]) as f64;
                let expected = (1.0 - share) * model.ms(batches[0], pair[0]) + share * model.ms(batches[0], pair[1]);
                prop_assert!(close(model.ms(batches[0], k), expected));
            }
        }
    }

    #[test]
    fn outside_the_grid_costs_stay_positive_and_do_not_fall((batches, ks, ms) in grids()) {
        let model = CostModel::new(&batches, &ks, &ms).unwrap();
        let (first, last) = (batches[0], *batches.last().unwrap());
        let deepest = *ks.last().unwrap();
        for k in 0..=deepest + 5 {
            prop_assert!(close(model.ms(0, k), model.ms(first, k)));
            for batch in last..last + 20 {
                prop_assert!(model.ms(batch, k) > 0.0);
                prop_assert!(model.ms(batch + 1, k) >= model.ms(batch, k) - 1e-9);
            }
        }
        for k in deepest.max(1)..deepest + 10 {
            prop_assert!(model.ms(first, k + 1) >= model.ms(first, k) - 1e-9);
        }
    }

    #[test]
    fn choices_equal_a_search_over_all(
        (batches, ks, ms) in grids(),
        shares in proptest::collection::vec(0.0_f64..=1.0, 0..8),
        batch in 1_usize..70,
    ) {
        let model = CostModel::new(&batches, &ks, &ms).unwrap();
        let lengths: Vec<f64> = (0..shares.len()).map(|k| 1.0 + shares[..=k].iter().sum::<f64>()).collect();
        let tpot = |batch: usize, k: usize| model.ms(batch, k) / if k == 0 { 1.0 } else { lengths[k - 1] };
        let best = model.best_k(batch, &lengths).unwrap();
        let last = model.last_paying_k(batch, &lengths).unwrap();
        for k in 0..=lengths.len() {
            prop_assert!(tpot(batch, best) <= tpot(batch, k));
            prop_assert!(k >= best || tpot(batch, k) > tpot(batch, best));
            prop_assert!(k <= last || tpot(batch, k) >= tpot(batch, 0));
        }
        prop_assert!(last == 0 || tpot(batch, last) < tpot(batch, 0));
        let even = model.break_even_batch(&lengths).unwrap();
        let range = batches[0]..=*batches.last().unwrap();
        let expected = range.into_iter().find(|&b| model.best_k(b, &lengths).unwrap() == 0);
        prop_assert_eq!(even, expected);
    }

    #[test]
    fn observing_converges_and_stays_positive(
        (batches, ks, ms) in grids(),
        pick in 0.0_f64..1.0,
        depth in 0_usize..12,
        seen in 0.01_f64..500.0,
        weight in 0.2_f64..=1.0,
    ) {
        let mut model = CostModel::new(&batches, &ks, &ms).unwrap();
        let (first, last) = (batches[0], *batches.last().unwrap());
        let batch = first + (pick * (last - first) as f64) as usize;
        let k = if ks.len() == 1 { 0 } else { depth.clamp(ks[1], *ks.last().unwrap()) };
        let (before, untouched) = (model.ms(batch, k), model.clone());
        model.observe(batch, k, seen, weight).unwrap();
        if batches.contains(&batch) && ks.contains(&k) {
            prop_assert!(close(model.ms(batch, k), (1.0 - weight) * before + weight * seen));
        }
        let moved = model.table().iter().zip(untouched.table()).filter(|(new, old)| (*new - *old).abs() > 1e-12).count();
        prop_assert!(moved <= 4);
        for _ in 0..2000 {
            model.observe(batch, k, seen, weight).unwrap();
        }
        prop_assert!(model.table().iter().all(|cost| *cost > 0.0));
        prop_assert!((model.ms(batch, k) / seen - 1.0).abs() < 1e-3, "{} {}", model.ms(batch, k), seen);
    }
}

#[test]
fn before_the_first_k_the_line_goes_on_but_not_below_its_share() {
    let model = CostModel::new(&[1], &[0, 3, 5], &[1.0, 6.0, 8.0]).unwrap();
    assert!(close(model.ms(1, 1), 4.0) && close(model.ms(1, 2), 5.0));
    let steep = CostModel::new(&[1], &[0, 3, 4], &[1.0, 6.0, 18.0]).unwrap();
    assert!(close(steep.ms(1, 1), 2.0));
    let falling = CostModel::new(&[1], &[0, 3, 4], &[1.0, 6.0, 5.0]).unwrap();
    assert!(close(falling.ms(1, 1), 6.0) && close(falling.ms(1, 9), 5.0));
    let single = CostModel::new(&[1], &[0, 4], &[2.0, 6.0]).unwrap();
    assert!(close(single.ms(1, 1), 3.0) && close(single.ms(1, 6), 8.0));
}

#[test]
fn of_equal_ks_the_smallest_is_best() {
    let model = CostModel::new(&[1], &[0, 1, 2], &[1.0, 2.0, 2.5]).unwrap();
    assert_eq!(model.best_k(1, &[2.0]).unwrap(), 0);
    assert_eq!(model.last_paying_k(1, &[2.0]).unwrap(), 0);
    assert_eq!(model.break_even_batch(&[2.0]).unwrap(), Some(1));
    assert_eq!(model.best_k(1, &[2.0, 2.5]).unwrap(), 0);
}

#[test]
fn an_observation_is_shared_by_how_near_the_grid_points_are() {
    let mut model = CostModel::new(&[1, 5], &[0, 2, 6], &[9.0, 4.0, 4.0, 9.0, 4.0, 4.0]).unwrap();
    model.observe(2, 5, 8.0, 0.5).unwrap(); // a quarter of the way in batch, three quarters in K: twice the cost
    let shares = [0.75 * 0.25, 0.75 * 0.75, 0.25 * 0.25, 0.25 * 0.75];
    let expected = shares.map(|share| 4.0 * (1.0 + 0.5 * share));
    let found = [model.table()[1], model.table()[2], model.table()[4], model.table()[5]];
    assert!(found.iter().zip(expected).all(|(&a, b)| close(a, b)), "{found:?} {expected:?}");
    assert!(close(model.ms(1, 0), 9.0) && close(model.ms(5, 0), 9.0));
}

#[test]
fn wrong_input_is_named() {
    let costs = [1.0, 2.0];
    for (error, parts) in [
        (CostModel::new(&[], &[0, 1], &costs), ["batches", "[]"]),
        (CostModel::new(&[0], &[0, 1], &costs), ["batches", "[0]"]),
        (CostModel::new(&[2, 2], &[0], &costs), ["batches", "[2, 2]"]),
        (CostModel::new(&[MAX_BATCH + 1], &[0, 1], &costs), ["batches", "1048576"]),
        (CostModel::new(&[1], &[1, 2], &costs), ["ks", "[1, 2]"]),
        (CostModel::new(&[1], &[0, 3, 2], &costs), ["ks", "[0, 3, 2]"]),
        (CostModel::new(&[1], &[0, 1, 2], &costs), ["len(ms)=2", "must be 3"]),
        (CostModel::new(&[1], &[0, 1], &[1.0, 0.0]), ["ms=0", "above 0"]),
        (CostModel::new(&[1], &[0, 1], &[f64::NAN, 1.0]), ["ms=NaN", "finite"]),
        (CostModel::lines(&[1, 2], &[line(1.0, 1.0, 1.0)]), ["len(lines)=1", "2"]),
        (CostModel::lines(&[1], &[line(-1.0, 1.0, 1.0)]), ["draft_ms=-1", "at least 0"]),
        (CostModel::lines(&[1], &[line(1.0, f64::INFINITY, 1.0)]), ["target_ms=inf", "finite"]),
        (CostModel::lines(&[1], &[line(1.0, 1.0, 0.0)]), ["vanilla_ms=0", "above 0"]),
    ] {
        let message = error.unwrap_err().to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    let mut model = CostModel::new(&[2, 4], &[0, 3, 5], &[1.0; 6]).unwrap();
    let before = model.clone();
    for (batch, k, ms, weight) in [
        (1, 0, 1.0, 0.5),
        (5, 0, 1.0, 0.5),
        (2, 2, 1.0, 0.5),
        (2, 6, 1.0, 0.5),
        (2, 3, f64::NAN, 0.5),
        (2, 3, 1.0, 0.0),
        (2, 3, 1.0, 1.5),
    ] {
        assert!(model.observe(batch, k, ms, weight).is_err());
        assert_eq!(model, before);
    }
    let error = CostModel::new(&[1], &[0], &[1.0]).unwrap().observe(1, 1, 1.0, 0.5).unwrap_err();
    assert!(error.to_string().contains("k=1: must be 0, the only K of the grid"), "{error}");
    for lengths in [&[0.9][..], &[2.1], &[1.5, f64::NAN], &[1.5, 3.5]] {
        assert!(model.best_k(2, lengths).is_err());
        assert!(model.last_paying_k(2, lengths).is_err());
        assert!(model.break_even_batch(lengths).is_err());
    }
    for (k, length) in [(0, 1.1), (1, 0.9), (1, 2.1), (3, f64::NAN)] {
        assert!(model.tpot(2, k, length).is_err() && model.speedup(2, k, length).is_err());
    }
    for (tpot, k, length, target) in [(0.0, 1, 1.5, 1.0), (1.0, 0, 1.0, 1.0), (1.0, 1, 2.5, 1.0), (1.0, 1, 1.5, -1.0)] {
        assert!(CostLine::implied_draft_ms(tpot, k, length, target).is_err());
    }
}
