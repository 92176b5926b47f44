//! Comparison of a suffix cache's drafts with a counter that keeps the texts and counts their substrings one by one,
//! under random calls.

use proptest::prelude::*;
use specrs_core::{Error, SuffixCache, SuffixSettings};

/// Number of requests that random calls name.
const IDS: i64 = 4;
/// Number of requests in all.
const ALL_IDS: i64 = 9;

#[derive(Clone, Debug)]
enum Op {
    Start(i64, Vec<u32>),
    Append(i64, Vec<u32>),
    Stop(i64),
    Evict(i64),
    /// Drafts after a request's text, and then after some more tokens.
    Propose(i64, usize, Vec<u32>),
}

fn op(alphabet: u32) -> impl Strategy<Value = Op> {
    let id = || 0..IDS;
    let text = |len| prop::collection::vec(0..alphabet, len);
    prop_oneof![
        3 => (id(), text(0..12)).prop_map(|(id, prompt)| Op::Start(id, prompt)),
        8 => (id(), text(0..6)).prop_map(|(id, tokens)| Op::Append(id, tokens)),
        // A run of one token: every suffix meets every other.
        1 => (id(), 0..alphabet, 1..12_usize).prop_map(|(id, token, len)| Op::Append(id, vec![token; len])),
        3 => id().prop_map(Op::Stop),
        1 => id().prop_map(Op::Evict),
        8 => (id(), 0..8_usize, text(0..4)).prop_map(|(id, most, more)| Op::Propose(id, most, more)),
    ]
}

fn settings() -> impl Strategy<Value = SuffixSettings> {
    let memory = prop_oneof![3 => Just(usize::MAX), 1 => 0..6000_usize];
    (
        2..9_usize,
        prop_oneof![Just(0), Just(1), Just(100)],
        0.2..3.0,
        prop_oneof![Just(0.0), Just(0.5), 0.0..1.0],
        memory,
    )
        .prop_map(|(depth, most, factor, least, memory)| {
            let mut settings = SuffixSettings::default();
            (settings.max_tree_depth, settings.max_cached_requests) = (depth, most);
            (settings.max_spec_factor, settings.min_token_prob) = (factor, least);
            settings.max_memory_bytes = memory;
            settings
        })
}

/// Reference model that keeps the texts as they are and derives nothing from them.
#[derive(Default)]
struct Texts {
    /// Running requests: id, prompt, output.
    running: Vec<(i64, Vec<u32>, Vec<u32>)>,
    /// Ended requests, oldest first: id and output.
    ended: Vec<(i64, Vec<u32>)>,
}

fn occurrences(texts: &[Vec<u32>], part: &[u32]) -> usize {
    texts.iter().map(|text| text.windows(part.len()).filter(|window| *window == part).count()).sum()
}

impl Texts {
    fn place(&self, id: i64) -> Option<usize> {
        self.running.iter().position(|request| request.0 == id)
    }

    /// Returns the draft after a text and `more`, its score and its pattern's length, by the rule that `SuffixCache`
    /// documents. Nothing of `more` is counted.
    fn propose(&self, settings: &SuffixSettings, place: usize, more: &[u32], most: usize) -> (Vec<u32>, f64, usize) {
        let (_, prompt, output) = &self.running[place];
        let counted = [prompt.as_slice(), output].concat();
        let text = [counted.as_slice(), more].concat();
        let mut others = Vec::new();
        if settings.max_cached_requests > 0 {
            others.extend(self.ended.iter().map(|ended| ended.1.clone()));
            others.extend(self.running.iter().map(|running| running.2.clone()));
        }
        let mut best = (Vec::new(), 0.0, 0);
        for texts in [vec![counted], others] {
            let room = |len: usize| {
                let most = most.min((settings.max_spec_factor * len as f64 + 1e-6).floor() as usize);
                most.min(settings.max_tree_depth - len)
            };
            let mut lens: Vec<usize> = (1..settings.max_tree_depth.min(text.len() + 1)).collect();
            lens.sort_by_key(|&len| std::cmp::Reverse((room(len), len)));
            for len in lens {
                let (mut part, room) = (text[text.len() - len..].to_vec(), room(len));
                let of_pattern = occurrences(&texts, &part);
                let mut score = 0.0;
                while part.len() < len + room {
                    let count = |token| occurrences(&texts, &[part.as_slice(), &[token]].concat());
                    // The first of the largest: ids ascend.
                    let (token, found) =
                        (0..8).map(|token| (token, count(token))).fold((0, 0), |a, b| if b.1 > a.1 { b } else { a });
                    let ratio = found as f64 / of_pattern as f64;
                    if found == 0 || ratio < settings.min_token_prob {
                        break;
                    }
                    part.push(token);
                    score += ratio;
                }
                if score > best.1 + 1e-9 {
                    best = (part[len..].to_vec(), score, len);
                }
            }
        }
        best
    }
}

/// Runs one call on both, and checks that the cache drafts the same as the counter.
fn apply(cache: &mut SuffixCache, texts: &mut Texts, op: &Op) {
    let settings = *cache.settings();
    let unknown = |request_id: i64| Err(Error::UnknownRequest { request_id });
    match op {
        Op::Start(id, prompt) => {
            let started = cache.start_request(*id, prompt);
            if texts.place(*id).is_some() {
                assert_eq!(started, Err(Error::DuplicateRequest { request_id: *id }));
            } else {
                started.expect("a new request");
                texts.running.push((*id, prompt.clone(), Vec::new()));
            }
        }
        Op::Append(id, tokens) => match texts.place(*id) {
            None => assert_eq!(cache.append(*id, tokens), unknown(*id)),
            Some(place) => {
                cache.append(*id, tokens).expect("a running request");
                texts.running[place].2.extend(tokens);
            }
        },
        Op::Stop(id) => match texts.place(*id) {
            None => assert_eq!(cache.stop_request(*id), unknown(*id)),
            Some(place) => {
                cache.stop_request(*id).expect("a running request");
                let (id, _, output) = texts.running.remove(place);
                if settings.max_cached_requests > 0 && !output.is_empty() {
                    texts.ended.push((id, output));
                }
            }
        },
        Op::Evict(id) => {
            let before = texts.ended.len();
            texts.ended.retain(|ended| ended.0 != *id);
            assert_eq!(cache.evict(*id), texts.ended.len() < before);
        }
        Op::Propose(id, most, more) => {
            let mut drafts = vec![0; *most];
            let Some(place) = texts.place(*id) else {
                assert_eq!(cache.propose(*id, &mut drafts).err(), unknown(*id).err());
                return;
            };
            for more in [&[][..], more] {
                let draft = cache.propose_after(*id, more, &mut drafts).expect("a running request");
                let (tokens, score, match_len) = texts.propose(&settings, place, more, *most);
                assert_eq!(drafts[..draft.len], tokens[..], "of {:?} and {more:?}", texts.running[place]);
                assert_eq!((draft.score.to_bits(), draft.match_len), (score.to_bits(), match_len));
                if more.is_empty() {
                    assert_eq!(cache.propose(*id, &mut drafts), Ok(draft));
                }
            }
        }
    }
    // Which outputs had to go, the cache says; that they are the oldest shows in what it drafts.
    let stats = cache.stats();
    assert!(stats.num_cached_requests <= settings.max_cached_requests);
    assert!(stats.num_cached_requests == 0 || stats.memory_bytes <= settings.max_memory_bytes, "{stats:?}");
    if settings.max_memory_bytes == usize::MAX {
        assert_eq!(stats.num_cached_requests, texts.ended.len().min(settings.max_cached_requests));
    }
    texts.ended.drain(..texts.ended.len() - stats.num_cached_requests);
    let len = |texts: &[Vec<u32>]| texts.iter().map(Vec::len).sum::<usize>();
    let outputs: Vec<_> = texts.running.iter().map(|request| request.2.clone()).collect();
    let prompts: Vec<_> = texts.running.iter().map(|request| request.1.clone()).collect();
    let ended: Vec<_> = texts.ended.iter().map(|request| request.1.clone()).collect();
    assert_eq!(stats.num_requests, texts.running.len());
    assert_eq!(stats.num_request_tokens, len(&prompts) + len(&outputs));
    let kept = if settings.max_cached_requests > 0 { len(&outputs) + len(&ended) } else { 0 };
    assert_eq!(stats.num_output_tokens, kept);
}

fn run(settings: SuffixSettings, ops: &[Op]) -> SuffixCache {
    let (mut cache, mut texts) = (SuffixCache::new(settings).expect("allowed settings"), Texts::default());
    let empty = cache.stats();
    for op in ops {
        apply(&mut cache, &mut texts, op);
    }
    // Everything can be given back: nothing is left but the root of the outputs' tree.
    let mut emptied = cache.clone();
    for id in 0..ALL_IDS {
        let _ = emptied.stop_request(id);
        emptied.evict(id);
    }
    assert_eq!(emptied.stats(), empty);
    cache
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn drafts_are_those_of_a_naive_counter(
        settings in settings(),
        ops in (1..5_u32).prop_flat_map(|alphabet| prop::collection::vec(op(alphabet), 1..60)),
    ) {
        run(settings, &ops);
    }

    /// Checks that a token that was the most frequent loses that place when outputs are evicted.
    #[test]
    fn counts_fall_as_outputs_go(
        texts in prop::collection::vec(prop::collection::vec(0..6_u32, 2..20), 8),
        order in Just((0..8_i64).collect::<Vec<_>>()).prop_shuffle(),
        ends in prop::collection::vec(0..6_u32, 8),
    ) {
        let cached = (0..).zip(texts).flat_map(|(id, text)| [Op::Start(id, vec![]), Op::Append(id, text), Op::Stop(id)]);
        let looks = order.into_iter().zip(ends).flat_map(|(gone, end)| {
            [Op::Start(8, vec![end]), Op::Propose(8, 4, vec![]), Op::Stop(8), Op::Evict(gone)]
        });
        let settings = SuffixSettings { max_tree_depth: 4, max_spec_factor: 4.0, ..SuffixSettings::default() };
        run(settings, &cached.chain(looks).collect::<Vec<_>>());
    }

    /// Checks that drafts depend on the texts alone, not on earlier contents of the cache.
    #[test]
    fn what_was_evicted_leaves_nothing_behind(
        settings in settings(),
        before in prop::collection::vec(op(3), 1..40),
        after in prop::collection::vec(op(3), 1..40),
    ) {
        let mut settings = settings;
        settings.max_memory_bytes = usize::MAX;
        let mut cache = run(settings, &before);
        for id in 0..ALL_IDS {
            let _ = cache.stop_request(id);
            cache.evict(id);
        }
        let mut texts = Texts::default();
        for op in &after {
            apply(&mut cache, &mut texts, op);
        }
    }
}

#[test]
fn settings_out_of_range_are_named() {
    let of = |change: fn(&mut SuffixSettings)| {
        let mut settings = SuffixSettings::default();
        change(&mut settings);
        SuffixCache::new(settings).map(|_| ()).unwrap_err().to_string()
    };
    let not = |field| move |message: String| assert!(message.starts_with(field), "{message}");
    not("max_tree_depth=0: must be from 2 to 256")(of(|settings| settings.max_tree_depth = 0));
    not("max_tree_depth=257")(of(|settings| settings.max_tree_depth = 257));
    not("max_spec_factor=NaN")(of(|settings| settings.max_spec_factor = f64::NAN));
    not("max_spec_factor=0: ")(of(|settings| settings.max_spec_factor = 0.0));
    not("min_token_prob=1.5: must be from 0 to 1")(of(|settings| settings.min_token_prob = 1.5));
    not("min_token_prob=NaN")(of(|settings| settings.min_token_prob = f64::NAN));
}
