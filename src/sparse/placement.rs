//! Which parts of a model go to devices of so much memory: a function of sizes and activation counts, nothing else.
//!
//! First the layers' attention with its cache, then predictors, then the head; what is left goes to the neurons that fire
//! most, of any layer. A layer has none on a device, or as many as make handing over to it worth while.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::ops::Range;

use crate::{Error, Result};

/// What there is to place, in bytes.
#[derive(Clone, Debug)]
pub struct Demand {
    pub layers: Vec<LayerDemand>,
    /// Output norm and output matrix.
    pub head: u64,
    /// What a device takes before anything is placed on it: its own context, activations, buffers for prefill.
    pub overhead: u64,
}

#[derive(Clone, Debug)]
pub struct LayerDemand {
    /// Attention's weights, norms and biases.
    pub attention: u64,
    /// The cache at full context.
    pub cache: u64,
    pub predictor: u64,
    /// One neuron: its rows of gate, up and down.
    pub neuron: u64,
    /// How often each neuron fired.
    pub counts: Vec<u64>,
}

impl LayerDemand {
    fn without_neurons(&self) -> Self {
        Self { counts: Vec::new(), ..self.clone() }
    }
}

/// Bytes placed on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    pub overhead: u64,
    pub attention: u64,
    pub cache: u64,
    pub predictors: u64,
    pub head: u64,
    pub neurons: u64,
}

impl Bytes {
    pub fn total(&self) -> u64 {
        self.overhead + self.attention + self.cache + self.predictors + self.head + self.neurons
    }
}

/// What one device holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DevicePlan {
    /// The layers that are its own: a device has nothing of the others'.
    pub layers: Range<usize>,
    /// The first so many of them have attention and cache on it ...
    pub n_attention: usize,
    /// ... and the first so many of those their predictors.
    pub n_predictors: usize,
    pub head: bool,
    /// Of each of its layers, the neurons on it, ascending.
    pub hot: Vec<Vec<u32>>,
    pub bytes: Bytes,
    /// The bytes from which it would have a layer.
    pub least: u64,
}

impl DevicePlan {
    /// The share of all activations of its layers that fall on its neurons; 0 where nothing fired.
    pub fn coverage(&self, demand: &Demand) -> f64 {
        let layers = &demand.layers[self.layers.clone()];
        let all: u64 = layers.iter().flat_map(|layer| &layer.counts).sum();
        let hot = |(layer, hot): (&LayerDemand, &Vec<u32>)| -> u64 {
            hot.iter().map(|neuron| layer.counts[*neuron as usize]).sum()
        };
        let covered: u64 = layers.iter().zip(&self.hot).map(hot).sum();
        if all == 0 { 0.0 } else { covered as f64 / all as f64 }
    }
}

/// Plans devices of `budgets` bytes. Layers are shared out by range, in proportion to the budgets; the last device has the
/// head. Neurons go to layers whose attention and predictor are there. A layer has no neuron on its device or at least `least` (or all). A budget that hasn't
/// room for a layer takes nothing.
pub fn place(demand: &Demand, budgets: &[u64], least: usize) -> Result<Vec<DevicePlan>> {
    let counts: u64 =
        demand.layers.iter().flat_map(|layer| &layer.counts).fold(0, |sum, n| sum.saturating_add(*n));
    if counts == u64::MAX {
        return Err(Error::argument("counts", "a sum beyond 64 bits", "counts of activations"));
    }
    let mut plans = Vec::new();
    for (i, layers) in shares(demand.layers.len(), budgets).into_iter().enumerate() {
        let has_head = i + 1 == budgets.len();
        plans.push(place_on_one(demand, layers, has_head, budgets[i], least));
    }
    Ok(plans)
}

/// Counts what devices' own contexts take, which they were planned without: `contexts` in bytes.
pub fn add_contexts(plans: &mut [DevicePlan], contexts: impl IntoIterator<Item = u64>) {
    for (plan, context) in plans.iter_mut().zip(contexts) {
        plan.least = plan.least.saturating_add(context);
        if plan.n_attention > 0 {
            plan.bytes.overhead += context;
        }
    }
}

/// As [`place`], with the neurons of each layer given, ascending: a layer has those that still fit, or the first so many.
pub fn place_given(demand: &Demand, budgets: &[u64], hot: &[Vec<u32>]) -> Result<Vec<DevicePlan>> {
    if hot.len() != demand.layers.len() {
        let expected = format!("{}, one a layer", demand.layers.len());
        return Err(Error::argument("hot_neurons", format!("{} layers", hot.len()), expected));
    }
    for (i, (hot, layer)) in hot.iter().zip(&demand.layers).enumerate() {
        let n = layer.counts.len() as u32;
        if hot.windows(2).any(|pair| pair[0] >= pair[1]) || hot.last().is_some_and(|last| *last >= n) {
            let expected = format!("numbers below {n}, ascending");
            return Err(Error::argument("hot_neurons", format!("other numbers in layer {i}"), expected));
        }
    }
    // No layer is worth while by itself: only what comes before neurons is placed.
    let bare = Demand { layers: demand.layers.iter().map(LayerDemand::without_neurons).collect(), ..*demand };
    let mut plans = place(&bare, budgets, 1)?;
    for (plan, budget) in plans.iter_mut().zip(budgets) {
        let start = plan.layers.start;
        for i in 0..plan.n_predictors {
            let (hot, layer) = (&hot[start + i], &demand.layers[start + i]);
            let left = budget.saturating_sub(plan.bytes.total());
            let fits = left.checked_div(layer.neuron).unwrap_or(u64::MAX);
            plan.hot[i].extend(hot.iter().take(usize::try_from(fits).unwrap_or(usize::MAX)));
            plan.bytes.neurons += plan.hot[i].len() as u64 * layer.neuron;
        }
    }
    Ok(plans)
}

/// Cuts layers into ranges in proportion to the budgets.
fn shares(n_layers: usize, budgets: &[u64]) -> Vec<Range<usize>> {
    let total: u128 = budgets.iter().map(|b| *b as u128).sum();
    let mut before: u128 = 0;
    let mut start = 0;
    budgets
        .iter()
        .map(|budget| {
            before += *budget as u128;
            let end = if total == 0 { 0 } else { (n_layers as u128 * before).div_ceil(total) as usize };
            let range = start..end;
            start = end;
            range
        })
        .collect()
}

fn place_on_one(
    demand: &Demand,
    layers: Range<usize>,
    has_head: bool,
    budget: u64,
    least: usize,
) -> DevicePlan {
    let own = &demand.layers[layers.clone()];
    let mut plan = DevicePlan { hot: vec![Vec::new(); own.len()], layers, ..DevicePlan::default() };
    let mut left = budget;
    let Some(first) = own.first().or(demand.layers.first()) else { return plan };
    plan.least = [demand.overhead, first.attention, first.cache, first.predictor]
        .into_iter()
        .fold(0, u64::saturating_add);
    if own.is_empty() || !take(&mut left, demand.overhead) {
        return plan;
    }
    for layer in own {
        if !take(&mut left, layer.attention + layer.cache) {
            break;
        }
        plan.n_attention += 1;
    }
    // Better one layer less than no room for a predictor, without which no neuron could come.
    while plan.n_attention > 0 && left < first.predictor {
        plan.n_attention -= 1;
        left += own[plan.n_attention].attention + own[plan.n_attention].cache;
    }
    if plan.n_attention == 0 {
        return plan;
    }
    plan.bytes.overhead = demand.overhead;
    plan.bytes.attention = own[..plan.n_attention].iter().map(|layer| layer.attention).sum();
    plan.bytes.cache = own[..plan.n_attention].iter().map(|layer| layer.cache).sum();
    for layer in &own[..plan.n_attention] {
        if !take(&mut left, layer.predictor) {
            break;
        }
        plan.n_predictors += 1;
        plan.bytes.predictors += layer.predictor;
    }
    if has_head && take(&mut left, demand.head) {
        plan.head = true;
        plan.bytes.head = demand.head;
    }
    // A device runs neurons of layers whose attention and predictor it has: otherwise it would wait for the host twice.
    let able = &own[..plan.n_predictors];
    let ranked: Vec<Ranked> = able.iter().map(|layer| Ranked::new(layer, least)).collect();
    for (n, (ranked, hot)) in choose(&ranked, left).into_iter().zip(ranked.iter().zip(&mut plan.hot)) {
        hot.extend(&ranked.order[..n]);
        hot.sort_unstable();
        plan.bytes.neurons += n as u64 * ranked.bytes;
    }
    plan
}

fn take(left: &mut u64, bytes: u64) -> bool {
    let fits = bytes <= *left;
    if fits {
        *left -= bytes;
    }
    fits
}

/// A layer's neurons, those that fired most first, equals by number.
struct Ranked<'a> {
    order: Vec<u32>,
    counts: &'a [u64],
    /// Of the first so many neurons, their counts' sum.
    sums: Vec<u64>,
    /// Of one neuron.
    bytes: u64,
    /// The fewest that are worth while.
    least: usize,
}

impl<'a> Ranked<'a> {
    fn new(layer: &'a LayerDemand, least: usize) -> Self {
        let counts = &layer.counts[..];
        let mut order: Vec<u32> = (0..counts.len() as u32).collect();
        order.sort_by_key(|neuron| std::cmp::Reverse(counts[*neuron as usize]));
        let mut sums = vec![0];
        for neuron in &order {
            sums.push(sums[sums.len() - 1] + counts[*neuron as usize]);
        }
        // A neuron without weights would make prices infinite.
        Self { order, counts, sums, bytes: layer.neuron.max(1), least: least.clamp(1, counts.len().max(1)) }
    }

    fn len(&self) -> usize {
        self.order.len()
    }

    /// What place `i` is worth a byte.
    fn worth(&self, i: usize) -> f64 {
        self.counts[self.order[i] as usize] as f64 / self.bytes as f64
    }

    /// How many neurons are worth more than `price` a byte, but the fewest allowed at least.
    fn at_price(&self, price: f64) -> usize {
        let (mut low, mut high) = (self.least, self.len());
        while low < high {
            let middle = low.midpoint(high);
            if self.worth(middle) > price {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }
}

/// What a change of the set must gain, of the whole: less is rounding.
const LEAST_GAIN: f64 = 1e-12;

/// How many neurons of each layer: as much activation as `budget` bytes can hold, to less than what one neuron adds.
///
/// For a set of layers that may have neurons the best choice is all those worth more than a price. The set is improved layer
/// by layer, from all of them on.
fn choose(layers: &[Ranked], budget: u64) -> Vec<usize> {
    let mut open: Vec<bool> = layers.iter().map(|layer| layer.len() > 0).collect();
    // Least worth goes first until the fewest of all others fit.
    let mut by_worth: Vec<usize> = (0..layers.len()).filter(|i| open[*i]).collect();
    let average =
        |i: usize| layers[i].sums[layers[i].least] as f64 / (layers[i].least as f64 * layers[i].bytes as f64);
    by_worth.sort_by(|a, b| average(*b).total_cmp(&average(*a)));
    while fewest(layers, &open) > budget {
        let last = by_worth.pop().expect("no layer needs no bytes");
        open[last] = false;
    }
    let mut best = value(layers, &open, budget).expect("the fewest fit");
    loop {
        let mut change = None;
        for flips in flips(layers, &open) {
            flip(&mut open, &flips);
            if let Some(value) = value(layers, &open, budget).filter(|v| *v > best * (1.0 + LEAST_GAIN)) {
                best = value;
                change = Some(flips.clone());
            }
            flip(&mut open, &flips);
        }
        match change {
            Some(flips) => flip(&mut open, &flips),
            None => break,
        }
    }
    let (mut chosen, _, mut left) = at_best_price(layers, &open, budget).expect("the best set fits");
    fill(layers, &open, &mut chosen, &mut left);
    chosen
}

/// One layer opened or closed; and, where layers are few and each is much of the whole, one of each.
fn flips(layers: &[Ranked], open: &[bool]) -> Vec<Vec<usize>> {
    const FEW: usize = 24;
    let of = |is_open: bool| (0..open.len()).filter(move |i| open[*i] == is_open && layers[*i].len() > 0);
    let mut flips: Vec<Vec<usize>> = of(false).chain(of(true)).map(|i| vec![i]).collect();
    if layers.len() <= FEW {
        flips.extend(of(false).flat_map(|closed| of(true).map(move |other| vec![closed, other])));
    }
    flips
}

fn flip(open: &mut [bool], which: &[usize]) {
    which.iter().for_each(|i| open[*i] = !open[*i]);
}

fn fewest(layers: &[Ranked], open: &[bool]) -> u64 {
    layers.iter().zip(open).filter(|(_, open)| **open).map(|(l, _)| l.least as u64 * l.bytes).sum()
}

/// The activation that the open layers can hold, with what is left over valued at the price.
fn value(layers: &[Ranked], open: &[bool], budget: u64) -> Option<f64> {
    let (chosen, price, left) = at_best_price(layers, open, budget)?;
    let held: u64 = layers.iter().zip(chosen).map(|(layer, n)| layer.sums[n]).sum();
    Some(held as f64 + price * left as f64)
}

/// The neurons that the lowest price leaves that the budget allows, the price, and the bytes left; none where the fewest
/// don't fit.
fn at_best_price(layers: &[Ranked], open: &[bool], budget: u64) -> Option<(Vec<usize>, f64, u64)> {
    const HALVINGS: usize = 64;
    let at = |price: f64| -> Vec<usize> {
        layers.iter().zip(open).map(|(layer, open)| if *open { layer.at_price(price) } else { 0 }).collect()
    };
    let cost = |chosen: &[usize]| -> u64 {
        layers.iter().zip(chosen).map(|(layer, n)| *n as u64 * layer.bytes).sum()
    };
    let highest =
        layers.iter().filter(|layer| layer.len() > 0).map(|layer| layer.worth(0)).fold(0.0, f64::max);
    let (mut low, mut high) = (0.0, highest);
    if cost(&at(high)) > budget {
        return None;
    }
    if cost(&at(low)) <= budget {
        high = low;
    }
    for _ in 0..HALVINGS {
        let middle = low + (high - low) / 2.0;
        if cost(&at(middle)) <= budget {
            high = middle;
        } else {
            low = middle;
        }
    }
    let chosen = at(high);
    let left = budget - cost(&chosen);
    Some((chosen, high, left))
}

/// The next neuron of a layer, ordered by its worth a byte, equals by layer.
struct Next {
    worth: f64,
    layer: usize,
}

impl Ord for Next {
    fn cmp(&self, other: &Self) -> Ordering {
        self.worth.total_cmp(&other.worth).then(other.layer.cmp(&self.layer))
    }
}

impl PartialOrd for Next {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Next {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Next {}

/// Gives what is left to the next best neurons that still fit.
fn fill(layers: &[Ranked], open: &[bool], chosen: &mut [usize], left: &mut u64) {
    let next = |layer: usize, n: usize| {
        (n < layers[layer].len()).then(|| Next { worth: layers[layer].worth(n), layer })
    };
    let mut heap: BinaryHeap<Next> =
        (0..layers.len()).filter(|i| open[*i]).filter_map(|i| next(i, chosen[i])).collect();
    while let Some(Next { layer, .. }) = heap.pop() {
        if take(left, layers[layer].bytes) {
            chosen[layer] += 1;
            heap.extend(next(layer, chosen[layer]));
        }
    }
}
