use super::choice::{Candidate, Choice};
use super::explore::PROBE_REACH;
use super::*;
use crate::CostLine;
use proptest::prelude::*;

/// Generator of random acceptance that depends only on a seed: xorshift64*.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Draws the number of accepted tokens in a draft of `k`, each accepted with `chance`.
    fn accepted(&mut self, k: i64, chance: f64) -> i64 {
        (0..k).take_while(|_| self.next() < chance).count() as i64
    }
}

fn lines(draft_ms: f64, target_ms: f64) -> CostModel {
    let line = CostLine { draft_ms, target_ms, vanilla_ms: target_ms };
    CostModel::lines(&[1, 64], &[line, line]).unwrap()
}

/// Planner and rows 0 to B - 1, for tests that decide and settle step after step with given chances of acceptance.
struct Loop {
    planner: SpeculationPlanner,
    chance: Chance,
    ks: Vec<i64>,
    probes: usize,
}

impl Loop {
    fn new(batch: usize, k: usize, costs: CostModel) -> Self {
        let planner = SpeculationPlanner::new(batch, k, costs, 0.01).unwrap();
        Self { planner, chance: Chance(0x9E37_79B9_7F4A_7C15), ks: vec![0; batch], probes: 0 }
    }

    /// Runs one step in which each row accepts with `chances[row]`. Returns the K of each row as chosen without the
    /// probe.
    fn step(&mut self, chances: &[f64]) -> Vec<i64> {
        let rows: Vec<i64> = (0..self.ks.len() as i64).collect();
        let (caps, lags) = (vec![self.planner.k as i64; rows.len()], vec![0; rows.len()]);
        let probing = self.planner.probe.map(|probe| probe.row);
        self.planner.decide(&rows, &caps, &lags, &mut self.ks).unwrap();
        self.probes += usize::from(self.planner.probe.is_some_and(|probe| Some(probe.row) != probing));
        let accepted: Vec<i64> =
            self.ks.iter().zip(chances).map(|(&k, &chance)| self.chance.accepted(k, chance)).collect();
        self.planner.settle(&rows, &self.ks, &self.ks, &accepted, None).unwrap();
        self.planner.last.iter().map(|&k| k as i64).collect()
    }

    fn run(&mut self, steps: usize, chances: &[f64]) -> Vec<i64> {
        (0..steps).map(|_| self.step(chances)).last().unwrap_or_default()
    }
}

/// Computes the expected tokens per millisecond straight from the definition.
fn rate(costs: &CostModel, odds: &[f64], by_position: &[f64], penalties: &[f64], ks: &[usize]) -> f64 {
    let mut tokens = ks.len() as f64;
    for (&own, &k) in odds.iter().zip(ks) {
        let chance = |o: &f64| own * o / (1.0 + own * o);
        tokens += (1..=k).map(|i| by_position[..i].iter().map(chance).product::<f64>()).sum::<f64>();
    }
    let mut ms = costs.ms(ks.len(), 0);
    for i in 1..=ks.iter().copied().max().unwrap_or(0) {
        let count = ks.iter().filter(|&&k| k >= i).count();
        ms += costs.ms(count, i) - costs.ms(count, i - 1);
    }
    ms += ks.iter().zip(penalties).filter(|(k, _)| **k > 0).map(|(_, penalty)| penalty).sum::<f64>();
    tokens / ms
}

/// Returns all ways to give each request a K from 0 to its cap.
fn assignments(caps: &[usize]) -> Vec<Vec<usize>> {
    let Some((&last, first)) = caps.split_last() else { return vec![vec![]] };
    assignments(first).into_iter().flat_map(|ks| (0..=last).map(move |k| [&ks[..], &[k]].concat())).collect()
}

/// Generates grids of costs that rise with batch and K, with kinks.
fn costs() -> impl Strategy<Value = CostModel> {
    proptest::collection::vec(0.05_f64..3.0, 12).prop_map(|steps| {
        let mut ms = vec![0.0; 12];
        for b in 0..3 {
            for k in 0..4 {
                let below = if b > 0 { ms[(b - 1) * 4 + k] } else { 0.0_f64 };
                let left = if k > 0 { ms[b * 4 + k - 1] } else { 0.0 };
                ms[b * 4 + k] = below.max(left) + steps[b * 4 + k];
            }
        }
        CostModel::new(&[1, 2, 3], &[0, 1, 2, 3], &ms).unwrap()
    })
}

fn odds(count: usize) -> impl Strategy<Value = Vec<f64>> {
    proptest::collection::vec(0.02_f64..20.0, count)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_choice_is_the_best_of_all(
        costs in costs(), mut own in (1_usize..=3).prop_flat_map(odds), by_position in odds(3), cap in 0_usize..=3, guess in 0.0_f64..9.0,
    ) {
        own.sort_by(|a, b| b.total_cmp(a));
        let mut choice = Choice::new(3, 3);
        choice.set_costs(&costs);
        let candidates: Vec<_> = own.iter().map(|&odds| Candidate { odds, cap, penalty: 0.0 }).collect();
        choice.set_candidates(&candidates, &by_position);
        let mut ks = vec![9; own.len()];
        let found = choice.solve(guess, &mut ks);
        let none = vec![0.0; own.len()];
        let value = |ks: &[usize]| rate(&costs, &own, &by_position, &none, ks);
        let best = assignments(&vec![cap; own.len()]).iter().map(|ks| value(ks)).fold(0.0, f64::max);
        prop_assert!((value(&ks) - best).abs() <= 1e-9 * best, "{ks:?} yields {}, the best is {best}", value(&ks));
        prop_assert!((found - best).abs() <= 1e-9 * best && (choice.rate(&ks) - best).abs() <= 1e-9 * best);
    }

    #[test]
    fn with_bounds_and_lags_it_is_as_good_as_any_one_k(
        costs in costs(), mut own in (1_usize..=3).prop_flat_map(odds), by_position in odds(3),
        caps in proptest::collection::vec(0_usize..=3, 3), lags in proptest::collection::vec(0.0_f64..2.0, 3),
    ) {
        own.sort_by(|a, b| b.total_cmp(a));
        let (caps, lags) = (&caps[..own.len()], &lags[..own.len()]);
        let mut choice = Choice::new(3, 3);
        choice.set_costs(&costs);
        let each = own.iter().zip(caps).zip(lags);
        let candidates: Vec<_> = each.map(|((&odds, &cap), &penalty)| Candidate { odds, cap, penalty }).collect();
        choice.set_candidates(&candidates, &by_position);
        let mut ks = vec![9; own.len()];
        let found = choice.solve(0.0, &mut ks);
        prop_assert!(ks.iter().zip(caps).all(|(k, cap)| k <= cap));
        let value = |ks: &[usize]| rate(&costs, &own, &by_position, lags, ks);
        prop_assert!((found - value(&ks)).abs() <= 1e-9 * found);
        let uniform = (0..=3).map(|k| value(&caps.iter().map(|&cap| cap.min(k)).collect::<Vec<_>>())).fold(0.0, f64::max);
        let (k, rate) = choice.best_uniform(1.0);
        prop_assert!((rate - uniform).abs() <= 1e-9 * uniform, "K = {k} yields {rate}, the best K for all {uniform}");
        for k in 0..=3 {
            let same: Vec<_> = caps.iter().map(|&cap| cap.min(k)).collect();
            prop_assert!(found >= value(&same) * (1.0 - 1e-9), "{ks:?} loses against K = {k}");
        }
    }

    #[test]
    fn any_stream_of_steps_stays_within_bounds(
        steps in proptest::collection::vec(
            proptest::collection::vec((0_i64..12, 0_i64..60, 0.0_f64..1.0, 0.1_f64..50.0), 1..6), 1..60),
        costs in costs(),
    ) {
        let mut planner = SpeculationPlanner::new(5, 4, costs, 0.01).unwrap();
        let mut chance = Chance(7);
        for step in &steps {
            let rows: Vec<i64> = (0..step.len() as i64).rev().collect();
            let caps: Vec<i64> = step.iter().map(|sequence| sequence.0).collect();
            let lags: Vec<i64> = step.iter().map(|sequence| sequence.1).collect();
            let mut ks = vec![-1; rows.len()];
            planner.decide(&rows, &caps, &lags, &mut ks).unwrap();
            prop_assert!(ks.iter().zip(&caps).all(|(&k, &cap)| (0..=cap.min(4)).contains(&k)), "{ks:?} of {caps:?}");
            let accepted: Vec<_> = ks.iter().zip(step).map(|(&k, sequence)| chance.accepted(k, sequence.2)).collect();
            planner.settle(&rows, &ks, &ks, &accepted, Some(step[0].3)).unwrap();
            prop_assert!(planner.conditional_acceptance().iter().all(|chance| (0.0..1.0).contains(chance)));
            prop_assert!(planner.take_collapsed().all(|row| rows.contains(&row)));
        }
    }
}

#[test]
fn a_good_draft_is_used_and_a_useless_one_is_not() {
    let mut good = Loop::new(1, 5, lines(0.1, 1.0));
    assert_eq!(good.run(300, &[0.95]), [5]);
    let mut useless = Loop::new(4, 5, lines(0.1, 1.0));
    assert_eq!(useless.run(300, &[0.0; 4]), [0; 4]);
    let growing =
        [(0.3, 1.0), (0.5, 1.4)].map(|(draft_ms, target_ms)| CostLine { draft_ms, target_ms, vanilla_ms: target_ms });
    let mut mixed = Loop::new(2, 5, CostModel::lines(&[1, 2], &growing).unwrap());
    let ks = mixed.run(300, &[0.9, 0.02]);
    assert!(ks[0] >= 2 && ks[1] == 0, "{ks:?}");
}

#[test]
fn constant_inputs_settle_on_one_choice() {
    for (accepted, most) in [(0, 0), (1, 3), (2, 4), (5, 5)] {
        let mut planner = SpeculationPlanner::new(3, 5, lines(0.2, 1.0), 0.01).unwrap();
        let (rows, caps, lags, mut ks) = ([0, 1, 2], [5; 3], [0; 3], [0; 3]);
        let mut changes = 0;
        let mut last = Vec::new();
        for step in 0..4000 {
            planner.decide(&rows, &caps, &lags, &mut ks).unwrap();
            let settled = ks.map(|k| k.min(accepted));
            planner.settle(&rows, &ks, &ks, &settled, Some(1.0 + 0.2 * ks[0] as f64)).unwrap();
            changes += usize::from(step >= 200 && planner.last != last);
            last.clone_from(&planner.last);
        }
        assert_eq!(changes, 0, "{accepted} accepted each time, and still it changes");
        assert!(last.iter().all(|&k| k <= most), "{accepted} accepted, {last:?} drafted");
    }
}

#[test]
fn a_choice_stays_until_another_promises_half_a_percent_more() {
    let mut planner = SpeculationPlanner::new(1, 7, lines(0.01, 1.0), 0.0).unwrap();
    let (mut changes, mut last, mut ks) = (0, None, [0]);
    // Drafts become slower by 0.05 % a step, so a change promises little more than it must.
    for step in 0..18_000 {
        let costs = lines(0.01 * 1.0005_f64.powi(step), 1.0);
        planner.choice.set_costs(&costs);
        planner.decide(&[0], &[7], &[0], &mut ks).unwrap();
        let (odds, by_position) = ([planner.own[0].odds], planner.overall.odds().to_vec());
        let rate = |k: usize| rate(&costs, &odds, &by_position, &[0.0], &[k]);
        let chosen = planner.last[0];
        let best = (0..=7).map(rate).fold(0.0, f64::max);
        assert!(rate(chosen) * 1.0051 >= best, "K = {chosen} where another gives {}", best / rate(chosen));
        if let Some(before) = last.replace(chosen).filter(|&before| before != chosen) {
            assert!(
                rate(chosen) > 1.004 * rate(before),
                "K = {before} to {chosen} for {}",
                rate(chosen) / rate(before)
            );
            changes += 1;
        }
    }
    assert!(changes >= 3 && last == Some(0), "{changes} changes, to {last:?}");
}

#[test]
fn a_useless_draft_costs_its_share_and_a_draft_that_becomes_good_is_found() {
    let (draft_ms, target_ms) = (0.5, 1.0);
    let mut engine = Loop::new(1, 5, lines(draft_ms, target_ms));
    engine.run(200, &[0.0]);
    let (mut ms, steps) = (0.0, 10_000);
    let probes = engine.probes;
    for _ in 0..steps {
        assert_eq!(engine.step(&[0.0]), [0]);
        ms += target_ms + draft_ms * engine.ks[0] as f64;
    }
    let lost = ms / (f64::from(steps) * target_ms) - 1.0;
    assert!(engine.probes > probes && lost < 0.01, "{} probes cost {lost}", engine.probes - probes);
    // Three probes take up to 3 x 8 x 5 x 0.5 / 0.004 ms.
    assert!((0..15_000).any(|_| engine.step(&[0.97])[0] > 0), "it was never found");
    assert!(engine.run(300, &[0.97])[0] >= 3);
}

#[test]
fn a_probe_reaches_a_few_positions_beyond_the_drafts_in_use() {
    let mut engine = Loop::new(1, 16, lines(0.05, 1.0));
    engine.run(400, &[0.0]);
    let mut deepest = 0;
    for _ in 0..20_000 {
        assert_eq!(engine.step(&[0.0]), [0]);
        deepest = deepest.max(engine.ks[0]);
    }
    assert_eq!(deepest, PROBE_REACH, "no probe of a useless draft pays for more");
    // Rows that are cheap and drafts that are good: step by step all 16 are drafted, and rows that are expensive are not.
    assert!((0..15_000).any(|_| engine.step(&[0.99])[0] == 16), "{:?}", engine.planner.last);
    let mut expensive = Loop::new(1, 16, lines(0.3, 1.0));
    let k = expensive.run(5_000, &[0.8])[0];
    assert!((1..=4).contains(&k), "{k}");
}

#[test]
fn a_lag_that_costs_more_than_it_brings_is_not_closed() {
    let planner = || SpeculationPlanner::new(1, 3, lines(0.4, 1.0), 0.01).unwrap();
    let mut ks = [9];
    planner().decide(&[0], &[3], &[0], &mut ks).unwrap();
    assert!(ks[0] > 0, "by its first guess");
    planner().decide(&[0], &[3], &[1_000_000], &mut ks).unwrap();
    assert_eq!(ks[0], 0);
}

#[test]
fn a_collapse_is_noticed_once_and_a_useless_draft_is_none() {
    let mut engine = Loop::new(2, 4, lines(0.1, 1.0));
    engine.run(200, &[0.8, 0.8]);
    assert_eq!(engine.planner.take_collapsed().count(), 0);
    let noticed = (0..20).position(|_| {
        engine.step(&[0.8, 0.0]);
        engine.planner.take_collapsed().collect::<Vec<_>>() == [1]
    });
    assert!(noticed.is_some_and(|steps| steps < 12), "{noticed:?}");
    for _ in 0..FOLLOWING {
        engine.step(&[0.8, 0.0]);
    }
    assert_eq!(engine.planner.take_collapsed().count(), 0, "not again within its patience");
    let mut useless = Loop::new(2, 4, lines(0.1, 1.0));
    useless.run(3000, &[0.03, 0.03]);
    assert_eq!(useless.planner.take_collapsed().count(), 0);
}

/// Number of drafts after a collapse within which the same request is not reported again.
const FOLLOWING: usize = 60;

#[test]
fn steps_that_mix_k_are_avoided_where_they_take_longer() {
    let growing =
        [(0.3, 1.0), (0.5, 1.4)].map(|(draft_ms, target_ms)| CostLine { draft_ms, target_ms, vanilla_ms: target_ms });
    let costs = CostModel::lines(&[1, 2], &growing).unwrap();
    for (factor, mixes) in [(1.0, true), (2.5, false)] {
        let mut planner = SpeculationPlanner::new(2, 3, costs.clone(), 0.0).unwrap();
        let (mut chance, mut ks, mut mixed) = (Chance(3), [0; 2], 0);
        for step in 0..600 {
            planner.decide(&[0, 1], &[3, 3], &[0, 0], &mut ks).unwrap();
            mixed += usize::from(step >= 300 && planner.last[0] != planner.last[1]);
            let accepted = [chance.accepted(ks[0], 0.9), chance.accepted(ks[1], 0.02)];
            let parts: f64 = costs.ms(2, 0)
                + (1..=3)
                    .map(|i| match ks.iter().filter(|&&k| k >= i).count() {
                        0 => 0.0,
                        count => costs.ms(count, i as usize) - costs.ms(count, i as usize - 1),
                    })
                    .sum::<f64>();
            let ms = parts * if ks[0] == ks[1] { 1.0 } else { factor };
            planner.settle(&[0, 1], &ks, &ks, &accepted, Some(ms)).unwrap();
        }
        assert!(if mixes { mixed > 200 } else { mixed < 20 }, "{mixed} of 300 steps mix at {factor}");
    }
}

#[test]
fn step_times_refine_the_costs() {
    let mut planner = SpeculationPlanner::new(1, 2, lines(0.1, 1.0), 0.01).unwrap();
    for step in 0..2000 {
        // Drafts cost five times what the table says, on a machine that is three times slower than it was.
        let k = (step / 8) % 3;
        let ms = 3.0 * (1.0 + 0.5 * k as f64);
        planner.settle(&[0], &[k], &[k], &[0], Some(ms)).unwrap();
    }
    let ratio = |k| planner.costs(false).ms(1, k) / planner.costs(false).ms(1, 0);
    assert!((ratio(1) - 1.5).abs() < 0.05 && (ratio(2) - 2.0).abs() < 0.07, "{:?}", planner.costs(false));
}

/// Simulated machine with costs of its own. It runs steps of `batch` requests, and accepts each draft token with
/// probability `chance`. Times vary by up to 5 %.
struct Machine {
    engine: Loop,
    truth: CostModel,
    chance: f64,
}

impl Machine {
    fn new(batch: usize, believed: CostModel, truth: CostModel, chance: f64) -> Self {
        Self { engine: Loop::new(batch, 5, believed), truth, chance }
    }

    /// Runs `steps` steps and returns the generated tokens per millisecond.
    fn run(&mut self, steps: usize) -> f64 {
        let batch = self.engine.ks.len();
        let (rows, caps, lags): (Vec<_>, _, _) = ((0..batch as i64).collect(), vec![5; batch], vec![0; batch]);
        let (mut tokens, mut ms) = (0.0, 0.0);
        for _ in 0..steps {
            let Loop { planner, chance, ks, .. } = &mut self.engine;
            planner.decide(&rows, &caps, &lags, ks).unwrap();
            let accepted: Vec<_> = ks.iter().map(|&k| chance.accepted(k, self.chance)).collect();
            let mut parts = self.truth.ms(batch, 0);
            for i in 1..=5 {
                let count = ks.iter().filter(|&&k| k >= i).count();
                parts += if count > 0 {
                    self.truth.ms(count, i as usize) - self.truth.ms(count, i as usize - 1)
                } else {
                    0.0
                };
            }
            let time = parts * (0.95 + 0.1 * chance.next());
            planner.settle(&rows, ks, ks, &accepted, Some(time)).unwrap();
            tokens += (batch as i64 + accepted.iter().sum::<i64>()) as f64;
            ms += time;
        }
        tokens / ms
    }

    /// Returns the tokens per millisecond if all requests draft the K that is best for the batch.
    fn best(&self) -> f64 {
        let batch = self.engine.ks.len();
        let length = |k: usize| (0..=k).map(|i| self.chance.powi(i as i32)).sum::<f64>();
        (0..=5).map(|k| batch as f64 * length(k) / self.truth.ms(batch, k)).fold(0.0, f64::max)
    }
}

/// Makes a cost model from `T_v`, `T_t` and `T_d` at batch 1, with twice the times at batch 4.
fn machine(vanilla_ms: f64, target_ms: f64, draft_ms: f64) -> CostModel {
    let row = [
        vanilla_ms,
        target_ms + draft_ms,
        target_ms + 2.0 * draft_ms,
        target_ms + 4.0 * draft_ms,
        target_ms + 5.0 * draft_ms,
    ];
    CostModel::new(&[1, 4], &[0, 1, 2, 4, 5], &[row, row.map(|ms| 2.0 * ms)].concat()).unwrap()
}

#[test]
fn costs_measured_on_a_busy_machine_are_found_out() {
    let truth = || machine(1.0, 1.2, 0.2);
    let cases = [
        ("drafts seem too slow", machine(1.0, 2.2, 0.5)),
        ("drafts seem to cost little", machine(1.0, 1.2, 0.06)),
        ("vanilla seems too slow", machine(2.0, 1.2, 0.2)),
        ("all seems too slow", machine(3.0, 3.6, 0.6)),
    ];
    for batch in [1, 4] {
        for chance in [0.02, 0.5, 0.8] {
            for (name, believed) in &cases {
                let mut machine = Machine::new(batch, believed.clone(), truth(), chance);
                machine.run(6000);
                let share = machine.run(4000) / machine.best();
                assert!(share > 0.93, "{name}, batch {batch}, {chance} accepted: {share:.3} of the best K");
            }
        }
    }
}

#[test]
fn trials_cost_their_share() {
    for batch in [1, 4] {
        for (chance, draft_ms) in [(0.02, 0.2), (0.7, 0.2), (0.5, 0.05)] {
            let costs = machine(1.0, 1.2, draft_ms);
            let mut machine = Machine::new(batch, costs.clone(), costs, chance);
            machine.run(1000);
            let share = machine.run(20_000) / machine.best();
            assert!(share > 0.98, "batch {batch}, {chance} accepted: {share:.3} of the best K");
        }
    }
}

#[test]
fn probes_cost_their_share_where_one_request_makes_all_pay() {
    // Useless drafts, of which each costs the step of 64 requests a fifth. A mixed step takes as long as if all drafted
    // the largest K.
    let ms = |k: i64| 10.0 + 2.0 * k as f64;
    let costs = CostModel::new(&[1, 64], &[0, 1, 7], &[5.0, 5.1, 5.7, ms(0), ms(1), ms(7)]).unwrap();
    let mut engine = Loop::new(64, 7, costs);
    let (rows, caps, lags): (Vec<i64>, _, _) = ((0..64).collect(), [7; 64], [0; 64]);
    let (mut spent, mut needed) = (0.0, 0.0);
    for step in 0..12_000 {
        let Loop { planner, chance, ks, .. } = &mut engine;
        planner.decide(&rows, &caps, &lags, ks).unwrap();
        let accepted: Vec<_> = ks.iter().map(|&k| chance.accepted(k, 0.02)).collect();
        let took = ms(*ks.iter().max().unwrap());
        planner.settle(&rows, ks, ks, &accepted, Some(took)).unwrap();
        if step >= 2000 {
            (spent, needed) = (spent + took, needed + ms(0));
        }
    }
    assert!(spent < 1.01 * needed, "{:.2} % more", 100.0 * (spent / needed - 1.0));
}

#[test]
fn steps_with_adapters_have_costs_of_their_own() {
    // Drafts that are mostly accepted pay if they are cheap. With an adapter, each costs as much as a pass.
    let (plain, adapted) = (lines(0.1, 1.0), lines(1.0, 1.0));
    let mut planner = SpeculationPlanner::new(2, 4, plain.clone(), 0.01).unwrap().with_lora_costs(adapted.clone());
    let decide = |planner: &mut SpeculationPlanner, rows: &[i64]| {
        let (caps, lags, mut ks) = (vec![4; rows.len()], vec![0; rows.len()], vec![-1; rows.len()]);
        planner.decide(rows, &caps, &lags, &mut ks).unwrap();
        ks
    };
    for _ in 0..300 {
        planner.settle(&[0], &[4], &[4], &[4], None).unwrap();
        planner.settle(&[0], &[4], &[4], &[3], None).unwrap();
    }
    planner.reset(1, true).unwrap();
    assert_eq!(decide(&mut planner, &[0]), [4]);
    // One request with an adapter is enough, because all rows run the same graph.
    assert_eq!(decide(&mut planner, &[0, 1]), [0, 0]);
    assert_eq!(decide(&mut planner, &[0]), [4]);
    assert_eq!((planner.costs(false), planner.costs(true)), (&plain, &adapted));
    // Times correct the costs of their own kind alone.
    for _ in 0..100 {
        planner.settle(&[0, 1], &[0, 0], &[0, 0], &[0, 0], Some(2.0)).unwrap();
    }
    assert_eq!(planner.costs(false), &plain);
    assert!(planner.costs(true).ms(2, 0) > 1.1);
    // A new request without an adapter. The first step at its costs may be a trial of another K.
    planner.reset(1, false).unwrap();
    assert!(decide(&mut planner, &[0, 1]).iter().all(|&k| k > 0));
}

#[test]
fn the_first_step_of_a_batch_and_k_teaches_nothing() {
    let costs = CostModel::new(&[1, 2], &[0, 1], &[1.0, 1.1, 1.0, 1.1]).unwrap();
    let mut planner = SpeculationPlanner::new(2, 1, costs.clone(), 0.0).unwrap().with_lora_costs(costs.clone());
    planner.reset(1, true).unwrap();
    // A kernel is compiled in each of these. The last ones are of steps with an adapter.
    for (rows, k) in [(&[0][..], 0), (&[0], 1), (&[1], 0), (&[1], 1)] {
        planner.settle(rows, &[k], &[k], &[0], Some(1000.0)).unwrap();
    }
    assert_eq!((planner.costs(false), planner.costs(true)), (&costs, &costs));
    planner.settle(&[0], &[0], &[0], &[0], Some(1000.0)).unwrap();
    assert_ne!(planner.costs(false), &costs);
    assert_eq!(planner.costs(true), &costs);
}

#[test]
fn without_costs_of_adapters_all_steps_cost_the_same() {
    let mut planner = SpeculationPlanner::new(1, 1, lines(0.1, 1.0), 0.01).unwrap();
    planner.reset(0, true).unwrap();
    for _ in 0..100 {
        planner.settle(&[0], &[0], &[0], &[0], Some(2.0)).unwrap();
    }
    assert!(planner.costs(false).ms(1, 0) > 1.1);
    assert_eq!(planner.costs(false), planner.costs(true));
}

#[test]
fn steps_without_a_time_are_no_trials() {
    let mut engine = Loop::new(1, 5, lines(0.1, 1.0));
    for _ in 0..2000 {
        engine.step(&[0.6]);
        assert!(engine.planner.trial.is_none());
    }
}

#[test]
fn wrong_input_is_refused_and_changes_nothing() {
    assert!(SpeculationPlanner::new(0, 1, lines(0.1, 1.0), 0.01).is_err());
    assert!(SpeculationPlanner::new(1, 0, lines(0.1, 1.0), 0.01).is_err());
    assert!(SpeculationPlanner::new(1, 1, lines(0.1, 1.0), -0.01).is_err());
    let mut planner = SpeculationPlanner::new(2, 3, lines(0.1, 1.0), 0.01).unwrap();
    let before = format!("{planner:?}");
    let mut ks = [0; 2];
    for (rows, caps, lags) in [
        (&[0, 2][..], &[1, 1][..], &[0, 0][..]),
        (&[-1, 0], &[1, 1], &[0, 0]),
        (&[0, 1], &[1], &[0, 0]),
        (&[0, 1], &[1, -1], &[0, 0]),
        (&[0, 1], &[1, 1], &[0, -4]),
    ] {
        let error = planner.decide(rows, caps, lags, &mut ks).unwrap_err();
        assert!(matches!(error, Error::InvalidBuffer { .. }), "{error}");
    }
    for (k, drafted, accepted, ms) in
        [(4, 1, 1, None), (-1, 0, 0, None), (2, 3, 0, None), (2, 1, 2, None), (2, -1, 0, None), (2, 1, 1, Some(0.0))]
    {
        assert!(planner.settle(&[0], &[k], &[drafted], &[accepted], ms).is_err());
    }
    assert!(planner.reset(2, false).is_err());
    assert_eq!(format!("{planner:?}"), before);
}
