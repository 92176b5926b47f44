//! Tests of the planner under random calls: its answers are allowed, its statistics stay finite, wrong calls change
//! nothing, and equal calls give equal answers. Unit tests next to the code judge its choices.

use proptest::prelude::*;
use specrs_core::{CostLine, CostModel, SpeculationPlanner};
use std::collections::VecDeque;

const ROWS: usize = 6;

#[derive(Clone, Debug)]
enum Op {
    /// New request on a row, with an adapter or without.
    Reset(usize, bool),
    /// Decision, with each row's presence in the step, its cap and its lag.
    Decide(Vec<(bool, i64, i64)>),
    /// Settlement, with each sequence's share of its K that is drafted and of its drafts that are accepted, and the
    /// step's time.
    Settle(Vec<(f64, f64)>, Option<f64>),
    TakeCollapsed,
    Wrong(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let cap = prop_oneof![3 => 0..9_i64, 1 => Just(i64::MAX)];
    let lag = prop_oneof![3 => Just(0_i64), 1 => 0..5000_i64, 1 => Just(i64::MAX)];
    let rows = prop::collection::vec((prop::bool::weighted(0.8), cap, lag), ROWS);
    let share = prop_oneof![Just(0.0), Just(1.0), 0.0..1.0];
    let ms = prop::option::of(prop_oneof![0.1..50.0, Just(f64::MIN_POSITIVE), Just(f64::MAX)]);
    prop_oneof![
        1 => (0..ROWS, prop::bool::weighted(0.3)).prop_map(|(row, has_lora)| Op::Reset(row, has_lora)),
        8 => rows.prop_map(Op::Decide),
        8 => (prop::collection::vec((share.clone(), share), ROWS), ms).prop_map(|(shares, ms)| Op::Settle(shares, ms)),
        1 => Just(Op::TakeCollapsed),
        1 => (0..8_usize).prop_map(Op::Wrong),
    ]
}

/// Rows of a decided step, and their K.
type Step = (Vec<i64>, Vec<i64>);

fn apply(planner: &mut SpeculationPlanner, op: &Op, in_flight: &mut VecDeque<Step>) -> Vec<i64> {
    match op {
        Op::Reset(row, has_lora) => planner.reset(*row, *has_lora).expect("a row"),
        Op::Decide(rows) => {
            let inside = rows.iter().zip(0..).filter(|(row, _)| row.0);
            let (rows, bounds): (Vec<i64>, Vec<(i64, i64)>) = inside.map(|(row, at)| (at, (row.1, row.2))).unzip();
            let (caps, lags): (Vec<_>, Vec<_>) = bounds.into_iter().unzip();
            let mut ks = vec![-1; rows.len()];
            planner.decide(&rows, &caps, &lags, &mut ks).expect("a step");
            let most = planner.num_speculative_tokens() as i64;
            assert!(ks.iter().zip(&caps).all(|(k, &cap)| (0..=cap.min(most)).contains(k)), "{ks:?} of {caps:?}");
            in_flight.push_back((rows, ks.clone()));
            return ks;
        }
        Op::Settle(shares, ms) => {
            let Some((rows, ks)) = in_flight.pop_front() else { return Vec::new() };
            let part = |count: i64, share: f64| (count as f64 * share).round() as i64;
            let drafted: Vec<_> = ks.iter().zip(shares).map(|(&k, share)| part(k, share.0)).collect();
            let accepted: Vec<_> = drafted.iter().zip(shares).map(|(&drafted, share)| part(drafted, share.1)).collect();
            planner.settle(&rows, &ks, &drafted, &accepted, *ms).expect("what became of a step");
        }
        Op::TakeCollapsed => {
            let mut collapsed: Vec<_> = planner.take_collapsed().collect();
            assert!(collapsed.iter().all(|row| (0..ROWS as i64).contains(row)), "{collapsed:?}");
            collapsed.sort_unstable();
            assert!(collapsed.windows(2).all(|pair| pair[0] < pair[1]), "a row twice: {collapsed:?}");
            assert_eq!(planner.take_collapsed().count(), 0);
            return collapsed;
        }
        Op::Wrong(which) => {
            let before = format!("{planner:?}");
            let k = planner.num_speculative_tokens() as i64;
            let refused = match which {
                0 => planner.reset(ROWS, false).is_err(),
                1 => planner.decide(&[ROWS as i64], &[1], &[0], &mut [0]).is_err(),
                2 => planner.decide(&[0], &[-1], &[0], &mut [0]).is_err(),
                3 => planner.decide(&[0], &[1], &[-1], &mut [0]).is_err(),
                4 => planner.decide(&[0, 1], &[1], &[0], &mut [0]).is_err(),
                5 => planner.settle(&[0], &[k + 1], &[0], &[0], None).is_err(),
                6 => planner.settle(&[0], &[1], &[1], &[2], None).is_err(),
                _ => planner.settle(&[0], &[1], &[1], &[1], Some(f64::NAN)).is_err(),
            };
            assert!(refused && format!("{planner:?}") == before, "wrong call {which}");
        }
    }
    Vec::new()
}

proptest! {
    #[test]
    fn any_calls_get_allowed_answers(
        k in 1..8_usize,
        lines in prop::collection::vec((0.0..5.0_f64, 0.01..20.0_f64), 1..4),
        catch_up_ms in prop_oneof![Just(0.0), 0.0..10.0_f64],
        has_lora_costs in prop::bool::ANY,
        ops in prop::collection::vec(op(), 1..150),
    ) {
        let batches: Vec<_> = (0..lines.len()).map(|at| 1 + 3 * at).collect();
        let lines: Vec<_> =
            lines.iter().map(|&(draft_ms, ms)| CostLine { draft_ms, target_ms: ms, vanilla_ms: ms }).collect();
        let costs = CostModel::lines(&batches, &lines).unwrap();
        let mut planner = SpeculationPlanner::new(ROWS, k, costs.clone(), catch_up_ms).unwrap();
        if has_lora_costs {
            planner = planner.with_lora_costs(costs);
        }
        let mut twin = planner.clone();
        let (mut in_flight, mut of_twin) = (VecDeque::new(), VecDeque::new());
        for op in &ops {
            let answer = apply(&mut planner, op, &mut in_flight);
            prop_assert_eq!(&answer, &apply(&mut twin, op, &mut of_twin));
            prop_assert!(planner.conditional_acceptance().iter().all(|chance| (0.0..=1.0).contains(chance)));
            for batch in 1..=ROWS {
                for (k, has_lora) in (0..=k).flat_map(|k| [(k, false), (k, true)]) {
                    let ms = planner.costs(has_lora).ms(batch, k);
                    prop_assert!(ms.is_finite() && ms > 0.0, "{ms} ms of batch {batch} at K = {k}");
                }
            }
        }
        prop_assert_eq!(format!("{planner:?}"), format!("{twin:?}"));
    }
}
