package controller

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"xagg/api"
	"xagg/controller/p4rt"
)

// Devices that come back, to this controller or to one that was restarted, are asked what they have. What is wanted stays
// as it is, and the job's packets notice nothing; what nobody here wants is removed.

// lost is told that a device does not have any more what it had of the jobs that run; server is its name, empty = the
// switch. Nothing has been installed there since: the jobs that run recover first. c.applying is held.
func (c *Controller) lost(ctx context.Context, server, reason string) {
	c.log.Warn("a device has lost its memory", "device", cmp.Or(server, c.cfg.Switch.Name), "reason", reason)
	if server == "" {
		// Of an async job the switch keeps nothing: it only has to know the way to the server again.
		c.recoverAll(ctx, "the switch has lost its memory", func(j *job) bool { return !j.async() })
		return
	}
	c.endAsync(server)
	c.recoverAll(ctx, fmt.Sprintf("server %s has lost its memory", server), func(j *job) bool { return j.onServer(server) })
}

// endAsync ends the async jobs that had running sums on a server which has lost them. Nobody can make them again: every
// rank has another part of them.
func (c *Controller) endAsync(server string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, j := range c.intent.sorted() {
		if meet := c.meets[j.spec.Name]; j.async() && j.onServer(server) && meet.state == stateRunning {
			meet.abort(fmt.Errorf("server %s has lost its memory, and with it the running sums of this async job: begin anew", server), nil)
			c.log.Error("job aborted", "job", meet.job, "err", meet.err)
		}
	}
}

// tablePhase says when the entries of a table are installed. A plan that announces another one is none of them: to remove
// it, it does not matter.
var tablePhase = map[string]phase{
	tableReplica: phaseReplica, tableMember: phaseMember, tableServer: phaseMember, tableReturning: phaseMember,
	tableIPv4: phaseMember, tableARP: phaseMember, tablePlan: phasePlan, tableJob: phaseJob,
}

func phaseOf(e p4rt.Entity) phase {
	if entry, ok := e.(p4rt.Entry); ok {
		return tablePhase[entry.Table]
	}
	return phaseGroup
}

// sortOut divides what a switch has among those who want it, or would have wanted it under an earlier plan: by owner and
// key. The rest is foreign, in the order in which it can be removed. c.mu is held.
func (c *Controller) sortOut(found []p4rt.Entity) (have map[uint16]objects, foreign []p4rt.Entity) {
	have = map[uint16]objects{baseOwner: newObjects()}
	wants := map[uint16]objects{baseOwner: c.base}
	for _, j := range c.intent.jobs {
		have[j.id], wants[j.id] = newObjects(), desiredJob(&c.intent, j)
	}
	for _, e := range found {
		owner, p, ok := c.ownerOf(e, wants)
		switch {
		case ok:
			have[owner].add(p, e)
		case !isDefault(e): // the program's own
			foreign = append(foreign, e)
		}
	}
	slices.SortStableFunc(foreign, func(a, b p4rt.Entity) int { return int(phaseOf(b)) - int(phaseOf(a)) })
	return have, foreign
}

// ownerOf returns who wants an entity, and its phase. Of a job that lives are also the entries of its earlier plans, and
// whatever has its groups and replica numbers.
func (c *Controller) ownerOf(e p4rt.Entity, wants map[uint16]objects) (owner uint16, p phase, ok bool) {
	for owner, want := range wants {
		if w, ok := want.entities[e.Key()]; ok {
			return owner, w.phase, true
		}
	}
	for _, j := range c.intent.jobs {
		if j.has(e) {
			return j.id, phaseOf(e), true
		}
	}
	return 0, 0, false
}

// has reports whether an entity can only be the job's.
func (j *job) has(e p4rt.Entity) bool {
	switch e := e.(type) {
	case p4rt.Group:
		return j.groups.contains(uint64(e.ID))
	case p4rt.Entry:
		for _, m := range e.Match {
			n, _ := m.Value.Uint()
			if m.Field == fieldJob && n == uint64(j.id) || m.Field == fieldRID && j.rids.contains(n) {
				return true
			}
		}
	}
	return false
}

func (s span) contains(n uint64) bool { return n >= uint64(s.base) && n < uint64(s.base+s.size) }

// takeSwitch makes a session the one that is written to. A switch whose pipeline is the one that was programmed last still
// has what it had, and is asked for it. Any other one is wiped: the intent alone says what it gets.
func (c *Controller) takeSwitch(ctx context.Context, session *p4rt.Session) error {
	c.applying.Lock()
	defer c.applying.Unlock()
	reading, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	c.mu.Lock()
	known, ours := c.pipeline != 0, c.pipeline == session.Cookie()
	c.mu.Unlock()
	if ours {
		if err := c.adoptSwitch(ctx, reading, session); err != nil {
			return err
		}
	} else {
		if err := session.Wipe(reading, wipeOrder...); err != nil {
			return err
		}
		if known {
			c.lost(ctx, "", "it has another pipeline than before")
		}
		c.mu.Lock()
		c.pipeline = session.Cookie()
		c.mu.Unlock()
	}
	if err := c.save(); err != nil {
		return err
	}
	c.links.update(func() { c.links.sw.session, c.links.sw.err = session, errProgramming })
	return nil
}

// adoptSwitch takes what the switch has for what is installed there, and removes what is foreign. A job that runs and is not
// known there any more was removed by somebody else, whose jobs may have had its slots since. c.applying is held.
func (c *Controller) adoptSwitch(ctx, reading context.Context, session *p4rt.Session) error {
	found, err := session.Entities(reading)
	if err != nil {
		return fmt.Errorf("read what the switch has: %w", err)
	}
	c.mu.Lock()
	have, foreign := c.sortOut(found)
	var removed []string
	for _, j := range c.intent.sorted() {
		if c.meets[j.spec.Name].state != stateRunning {
			continue
		}
		for key, e := range desiredJob(&c.intent, j).entities {
			if _, ok := have[j.id].entities[key]; e.phase == phaseJob && !ok {
				removed = append(removed, j.spec.Name)
			}
		}
	}
	c.mu.Unlock()
	if len(foreign) > 0 {
		c.log.Warn("the switch has what nobody here wants; it is removed", "entities", len(foreign), "first", foreign[0].Key())
		if err := session.Delete(reading, foreign...); err != nil {
			return fmt.Errorf("remove what is foreign: %w", err)
		}
	}
	for owner, o := range have {
		if _, ok := c.have[owner]; !ok {
			c.have[owner] = newObjects()
		}
		for key, e := range o.entities {
			c.have[owner].entities[key] = e
		}
	}
	c.log.Info("the switch has what it had", "entities", len(found), "foreign", len(foreign))
	if len(removed) > 0 {
		c.lost(ctx, "", fmt.Sprintf("another controller has removed job %s from it", removed[0]))
	}
	return nil
}

// takeAgent makes a connection the one that is written to. The plans that the server has are taken for what is installed
// there, and foreign ones are removed.
func (c *Controller) takeAgent(ctx context.Context, s Server, client api.AgentClient) (*api.ServerInfo, error) {
	info, err := probe(ctx, client)
	if err != nil {
		return nil, err
	}
	c.applying.Lock()
	defer c.applying.Unlock()
	c.mu.Lock()
	c.intent.serverSlots[s.Name] = uint64(info.GetSlots())
	c.mu.Unlock()
	link := c.links.agents[s.Name]
	reading, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	list, err := client.List(reading, &api.ListRequest{})
	switch status.Code(err) {
	case codes.OK:
		err = c.adoptAgent(ctx, reading, s.Name, client, info.GetInstance(), list.GetPlans())
	case codes.Unimplemented:
		err = c.doubtAgent(reading, link, client)
	default:
		err = fmt.Errorf("read what the server has: %w", err)
	}
	if err != nil {
		return nil, err
	}
	if err := c.save(); err != nil {
		return nil, err
	}
	c.links.update(func() { link.client, link.info, link.err = client, info, errProgramming })
	return info, nil
}

// doubtAgent is for an agent that does not tell what it has. At the first connection of this controller's life everything
// that another controller left is removed; later, what this controller has installed may or may not be there any more, and
// is installed again, which keeps the lease of a job that is. c.applying is held.
func (c *Controller) doubtAgent(ctx context.Context, link *agentLink, client api.AgentClient) error {
	if !link.wiped {
		if _, err := client.Remove(ctx, &api.RemoveRequest{}); err != nil {
			return fmt.Errorf("remove what an earlier controller installed: %w", err)
		}
		link.wiped = true
	}
	for _, have := range c.have {
		for key, plan := range have.plans {
			if key.server == link.server.Name {
				plan.doubt = true
				have.plans[key] = plan
			}
		}
	}
	return nil
}

// adoptAgent takes the plans that a server has for what is installed there, and removes foreign ones. The server has lost
// its memory when its arena is another one, or when a job's plan is not there that was: whose memory was leased to others
// meanwhile. A job that recovers needs nothing that a server has, which may not have the next plan yet. c.applying is held.
func (c *Controller) adoptAgent(ctx, reading context.Context, name string, client api.AgentClient, instance uint64, plans []*api.ServerPlan) error {
	for _, have := range c.have {
		for key := range have.plans {
			if key.server == name {
				delete(have.plans, key)
			}
		}
	}
	var foreign []planKey
	c.mu.Lock()
	for _, p := range plans {
		key := planKey{name, uint16(p.GetJob()), uint16(p.GetEpoch())}
		if c.intent.byID(key.job) == nil {
			foreign = append(foreign, key)
			continue
		}
		if _, ok := c.have[key.job]; !ok {
			c.have[key.job] = newObjects()
		}
		c.have[key.job].plans[key] = c.planOf(p)
	}
	reason := ""
	if was := c.arenas[name]; was != 0 && was != instance {
		reason = "it has other memory than before"
	}
	c.arenas[name] = instance
	for _, j := range c.intent.sorted() {
		key := planKey{name, j.id, j.epoch}
		if _, ok := c.have[j.id].plans[key]; !ok && reason == "" && c.meets[j.spec.Name].state == stateRunning &&
			j.recovering == recoverNot && slices.Contains(j.decision.Servers, name) {
			reason = fmt.Sprintf("somebody has removed the plan of job %s from it", j.spec.Name)
		}
	}
	c.mu.Unlock()
	for _, key := range foreign {
		c.log.Warn("the server has a plan that nobody here wants; it is removed", "server", name, "job", key.job, "epoch", key.epoch)
		if _, err := client.Remove(reading, &api.RemoveRequest{Job: uint32(key.job), Epoch: uint32(key.epoch)}); err != nil {
			return fmt.Errorf("remove foreign plan of job %d epoch %d: %w", key.job, key.epoch, err)
		}
	}
	if reason != "" {
		c.lost(ctx, name, reason)
	}
	return nil
}

// planOf reads a server's plan. One for another service address is installed anew.
func (c *Controller) planOf(p *api.ServerPlan) serverPlan {
	hw, err := net.ParseMAC(p.GetServiceMac())
	return serverPlan{
		ranks: p.GetRanks(), chunks: p.GetChunks(), rounds: p.GetRounds(),
		quorum: p.GetQuorum(), waitUS: p.GetWaitUs(), async: p.GetAsync(), staleness: p.GetStaleness(),
		next:  uint16(p.GetNextEpoch()),
		doubt: err != nil || !slices.Equal(hw, net.HardwareAddr(c.cfg.Service.MAC[:])) || p.GetServiceIp() != c.cfg.Service.IP.String(),
	}
}
