//! Tests of `LoRA` adapters: how many run at once, in which order, and which blocks each may share.

use specrs_core::{Error, KvEvent, Lora, SchedulerConfig};

use crate::common::driver::{Ask, Driver};
use crate::{ask, small};

fn adapters(max_loras: usize) -> SchedulerConfig {
    SchedulerConfig { max_loras, enable_kv_cache_events: true, ..small() }
}

fn lora(id: u32, name: &str) -> Lora {
    Lora { id, name: name.into() }
}

/// Adds a request with text `id` and adapter `of`, 0 for none.
fn add(driver: &mut Driver, id: i64, of: u32, max_tokens: usize) {
    let lora = (of > 0).then(|| lora(of, "adapter"));
    driver.add(id, &Ask { lora, ..ask(id as u64, 5, max_tokens) }).unwrap();
}

fn running(driver: &Driver) -> Vec<i64> {
    let ids = driver.scheduler.request_ids();
    ids.filter(|&id| driver.scheduler.clone().preempt(id).is_ok()).collect()
}

#[test]
fn the_one_too_many_waits_and_the_base_model_goes_on_next_to_it() {
    let mut driver = Driver::new(adapters(2));
    for (id, of) in [(0, 1), (1, 2), (2, 3), (3, 0), (4, 1)] {
        add(&mut driver, id, of, if id == 0 { 2 } else { 6 });
    }
    driver.plan_step();
    assert_eq!(running(&driver), [0, 1, 3], "2 waits for an adapter's place, 4 is not to overtake it");
    driver.settle();
    driver.plan_step();
    driver.settle();
    driver.plan_step();
    assert_eq!(running(&driver), [1, 2, 3], "0 has ended");
    driver.run();
    assert!(driver.outcomes.values().all(|outcome| outcome.output == outcome.expected));
}

#[test]
fn a_stream_of_one_adapter_does_not_starve_another() {
    let mut driver = Driver::new(adapters(1));
    add(&mut driver, 0, 1, 4);
    driver.plan_step();
    driver.settle();
    add(&mut driver, 1, 2, 4);
    for id in 2..30 {
        add(&mut driver, id, 1, 4);
        driver.plan_step();
        driver.settle();
        if running(&driver).contains(&1) {
            assert!(id < 8, "it waited for those before it alone, until request {id} came");
            return;
        }
    }
    panic!("request 1 starved");
}

#[test]
fn prefixes_are_those_of_one_adapter() {
    let mut driver = Driver::new(adapters(1));
    let [a, b, c] = [lora(1, "a"), lora(2, "a"), lora(1, "b")].map(Some);
    let cases = [(None, 0), (a.clone(), 0), (b, 0), (c, 0), (a, 12), (None, 24)];
    for (id, (lora, expected)) in cases.into_iter().enumerate() {
        driver.add(id as i64, &Ask { lora: lora.clone(), ..ask(1, 13, 1) }).unwrap();
        driver.run();
        assert_eq!(driver.scheduler.num_cached_tokens(), expected, "{lora:?}");
        let told = driver.scheduler.take_kv_events();
        let told = told.iter().find_map(|event| match event {
            KvEvent::BlockStored { lora, .. } => Some(lora.clone()),
            _ => None,
        });
        assert!(told.is_none_or(|told| told == lora));
    }
    // A salt is no adapter, whatever it says.
    let salt = [&b"LoRA"[..], &1_u32.to_le_bytes(), b"a"].concat();
    driver.add(9, &Ask { salt, ..ask(1, 13, 1) }).unwrap();
    driver.run();
    assert_eq!(driver.scheduler.num_cached_tokens(), 24);
}

#[test]
fn what_no_adapter_is_named_by_is_refused() {
    for (config, lora) in [(small(), lora(1, "a")), (adapters(1), lora(0, "a")), (adapters(1), lora(1, ""))] {
        let mut driver = Driver::new(config);
        let refused = driver.add(0, &Ask { lora: Some(lora), ..ask(1, 5, 1) });
        assert!(matches!(refused, Err(Error::InvalidRequest { field: "lora", .. })), "{refused:?}");
    }
}
